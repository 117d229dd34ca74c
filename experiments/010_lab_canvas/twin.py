"""The torch twin of a DiffusionGemma checkpoint, text only, for training: all canvases of a window in one pass.

Parameter names are the published ones, so `state_dict` is the checkpoint. One stack of weights runs twice: the
encoder pass is causal and leaves keys and values; in the decoder pass every canvas of C positions sees the encoder's
rows before it (the last window - 1 of them in sliding layers) and itself, both ways. A window of L tokens trains
L / C canvases at once; one at a time, through a cache, gives the same numbers (`mtplab.models.canvas`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass
class Config:
    vocab: int = 4096
    dim: int = 192
    ffn: int = 576
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 48
    full_kv_heads: int = 2
    full_head_dim: int = 48
    window: int = 96
    canvas: int = 32
    experts: int = 4
    top_k: int = 2
    expert_ffn: int = 16
    eps: float = 1e-6
    cap: float = 30.0
    theta: dict = field(default_factory=lambda: {SLIDING: 10_000.0, FULL: 10_000.0})
    rotated: float = 0.25  # share of a full layer's head that turns ("proportional" rotary embedding)
    layers: tuple[str, ...] = (*[SLIDING] * 7, FULL)

    def published(self) -> dict:
        """The `config.json` of this model."""
        text = {
            "model_type": "diffusion_gemma_text",
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "intermediate_size": self.ffn,
            "num_hidden_layers": len(self.layers),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_global_key_value_heads": self.full_kv_heads,
            "head_dim": self.head_dim,
            "global_head_dim": self.full_head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "rms_norm_eps": self.eps,
            "sliding_window": self.window,
            "layer_types": list(self.layers),
            "num_experts": self.experts,
            "top_k_experts": self.top_k,
            "moe_intermediate_size": self.expert_ffn,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": self.theta[SLIDING]},
                FULL: {
                    "rope_type": "proportional",
                    "partial_rotary_factor": self.rotated,
                    "rope_theta": self.theta[FULL],
                },
            },
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        return {
            "architectures": ["DiffusionGemmaForBlockDiffusion"],
            "model_type": "diffusion_gemma",
            "canvas_length": self.canvas,
            "tie_word_embeddings": True,
            "dtype": "float16",
            "text_config": text,
        }


class Norm(nn.Module):
    def __init__(self, size: int, eps: float, value: float = 1.0):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.full((size,), value)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.to(self.weight.dtype), (x.shape[-1],), self.weight, self.eps)


def linear(size_in: int, size_out: int, bias: bool = False) -> nn.Linear:
    module = nn.Linear(size_in, size_out, bias=bias)
    nn.init.normal_(module.weight, std=size_in**-0.5)
    if bias:
        nn.init.zeros_(module.bias)
    return module


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding, halves split. x: [B, H, L, hd]; angles: cos and sin, [L, hd/2]."""
    cos, sin = angles
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Attention, causal without a mask; in float32 whatever autocast says: with heads this small bfloat16 is slower."""
    q, k, v = q.float(), k.float(), v.float()
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=1.0)


class Places:
    """Angles and masks of one window length, made once. Masks are True where a query may look."""

    def __init__(self, c: Config, length: int):
        at, block = torch.arange(length), torch.arange(length) // c.canvas
        self.angles = {kind: self._angles(c, kind, at) for kind in (SLIDING, FULL)}
        blocks = length // c.canvas
        self.full = torch.cat([at[None] < (block * c.canvas)[:, None], block[:, None] == block[None]], 1)
        # One canvas of queries against the window + canvas columns that end with it.
        start, q = torch.arange(blocks)[:, None, None] * c.canvas, torch.arange(c.canvas)[None, :, None]
        past = torch.arange(c.window)[None, None] - c.window + start
        own = torch.ones(blocks, c.canvas, c.canvas, dtype=torch.bool)
        seen = ((past >= 0) & (past > start - c.window)).expand(-1, c.canvas, -1)
        self.canvas = torch.cat([seen, own], -1)
        column = torch.cat([past, start + torch.arange(c.canvas)[None, None]], -1)
        row = start + q
        self.causal = (column >= 0) & (column <= row) & (column > row - c.window)

    @staticmethod
    def _angles(c: Config, kind: str, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = c.full_head_dim if kind == FULL else c.head_dim
        half = torch.arange(size // 2, dtype=torch.float32)
        freq = c.theta[kind] ** (-2 * half / size)
        if kind == FULL:
            freq = torch.where(half < int(c.rotated * size // 2), freq, 0.0)
        angle = at[:, None].float() * freq
        return angle.cos(), angle.sin()


class Attention(nn.Module):
    def __init__(self, c: Config, kind: str):
        super().__init__()
        self.c, self.kind = c, kind
        full = kind == FULL
        self.size, self.kv = (c.full_head_dim, c.full_kv_heads) if full else (c.head_dim, c.kv_heads)
        self.q_proj = linear(c.dim, c.heads * self.size, True)
        self.k_proj = linear(c.dim, self.kv * self.size, True)
        self.v_proj = None if full else linear(c.dim, self.kv * self.size, True)
        self.o_proj = linear(c.heads * self.size, c.dim, True)
        # The products are not scaled, so the norms' weights begin at what a scale of size ** -0.5 would do.
        self.q_norm = Norm(self.size, c.eps, self.size**-0.25)
        self.k_norm = Norm(self.size, c.eps, self.size**-0.25)

    def forward(self, x: torch.Tensor, places: Places, past: tuple | None) -> tuple[torch.Tensor, tuple]:
        """x: [B, L, D]; past: the encoder's (k, v) in the decoder pass. Returns the output and this pass's (k, v)."""
        B, L, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, L, -1, self.size)).transpose(1, 2)
        k = self.k_proj(x).view(B, L, self.kv, self.size)
        v = k if self.v_proj is None else self.v_proj(x).view(B, L, self.kv, self.size)
        v = F.rms_norm(v, (self.size,), None, self.c.eps).transpose(1, 2)
        angles = places.angles[self.kind]
        q, k = rotate(q, angles), rotate(self.k_norm(k).transpose(1, 2), angles)
        over = self._full if self.kind == FULL else self._sliding
        y = over(q, k, v, places, past)
        return self.o_proj(y.transpose(1, 2).reshape(B, L, -1)), (k, v)

    def _full(self, q, k, v, places: Places, past: tuple | None) -> torch.Tensor:
        rep = self.c.heads // self.kv
        if past is None:
            k, v = (a.repeat_interleave(rep, 1) for a in (k, v))
            return attend(q, k, v)
        k, v = (torch.cat([p, a], 2).repeat_interleave(rep, 1) for p, a in zip(past, (k, v), strict=True))
        return attend(q, k, v, places.full)

    def _sliding(self, q, k, v, places: Places, past: tuple | None) -> torch.Tensor:
        """Every canvas of queries against the window before it and itself: [B * blocks, kv, rep * C, window + C]."""
        B, H, L, size = q.shape
        C, W, kv, rep = self.c.canvas, self.c.window, self.kv, H // self.kv
        blocks = L // C
        q = q.view(B, kv, rep, blocks, C, size).permute(0, 3, 1, 2, 4, 5).reshape(B * blocks, kv, rep * C, size)
        before = past or (k, v)
        rows = [self._columns(p, a, W, C) for p, a in zip(before, (k, v), strict=True)]
        mask = (places.causal if past is None else places.canvas)[:, None].repeat(B, 1, rep, 1)
        y = attend(q, rows[0], rows[1], mask)
        return y.view(B, blocks, kv, rep, C, size).permute(0, 2, 3, 1, 4, 5).reshape(B, H, L, size)

    @staticmethod
    def _columns(before: torch.Tensor, own: torch.Tensor, W: int, C: int) -> torch.Tensor:
        """[B, kv, L, hd] twice -> [B * blocks, kv, W + C, hd]: the W rows of `before` that precede a canvas, and it."""
        B, kv, L, size = own.shape
        past = F.pad(before, (0, 0, W, 0)).unfold(2, W, C)[:, :, : L // C].transpose(-1, -2)
        both = torch.cat([past, own.view(B, kv, L // C, C, size)], 3)
        return both.transpose(1, 2).reshape(-1, kv, W + C, size)


class MLP(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj, self.up_proj = linear(c.dim, c.ffn), linear(c.dim, c.ffn)
        self.down_proj = linear(c.ffn, c.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class SelfConditioning(MLP):
    def __init__(self, c: Config):
        super().__init__(c)
        self.pre_norm, self.eps = Norm(c.dim, c.eps), c.eps

    def forward(self, embedded: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(embedded + super().forward(self.pre_norm(soft)), (embedded.shape[-1],), None, self.eps)


class Router(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c, self.proj = c, linear(c.dim, c.experts)
        self.scale, self.per_expert_scale = nn.Parameter(torch.ones(c.dim)), nn.Parameter(torch.ones(c.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The weight of every expert, zero for those not chosen: [..., experts]."""
        x = F.rms_norm(x, (x.shape[-1],), None, self.c.eps) * self.scale * self.c.dim**-0.5
        weights, chosen = self.proj(x).softmax(-1).topk(self.c.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True) * self.per_expert_scale[chosen]
        return torch.zeros(*x.shape[:-1], self.c.experts).scatter(-1, chosen, weights)


class Experts(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(c.experts, 2 * c.expert_ffn, c.dim) * c.dim**-0.5)
        self.down_proj = nn.Parameter(torch.randn(c.experts, c.dim, c.expert_ffn) * c.expert_ffn**-0.5)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """All experts on every row (they are few and small); those not chosen have weight zero."""
        E, two, D = self.gate_up_proj.shape
        both = (x @ self.gate_up_proj.view(E * two, D).T).view(*x.shape[:-1], E, two)
        gate, up = both.chunk(2, -1)
        h = F.gelu(gate, approximate="tanh") * up * weights[..., None]
        return h.flatten(-2) @ self.down_proj.transpose(1, 2).reshape(-1, D)


class Layer(nn.Module):
    def __init__(self, c: Config, kind: str):
        super().__init__()
        small = (2 * len(c.layers)) ** -0.5
        self.self_attn, self.mlp = Attention(c, kind), MLP(c)
        self.router, self.experts = Router(c), Experts(c)
        self.input_layernorm, self.post_attention_layernorm = Norm(c.dim, c.eps), Norm(c.dim, c.eps, small)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = Norm(c.dim, c.eps), Norm(c.dim, c.eps, small)
        self.post_feedforward_layernorm_1 = Norm(c.dim, c.eps)
        self.post_feedforward_layernorm_2, self.pre_feedforward_layernorm_2 = Norm(c.dim, c.eps), Norm(c.dim, c.eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, places: Places, past: tuple | None, scalar: torch.Tensor):
        y, kv = self.self_attn(self.input_layernorm(x), places, past)
        x = x + self.post_attention_layernorm(y)
        dense = self.post_feedforward_layernorm_1(self.mlp(self.pre_feedforward_layernorm(x)))
        mixed = self.experts(self.pre_feedforward_layernorm_2(x), self.router(x))
        y = self.post_feedforward_layernorm(dense + self.post_feedforward_layernorm_2(mixed))
        return (x + y) * scalar, kv


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer_scalar = nn.Parameter(torch.ones(1))


class LabCanvas(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        decoder = nn.Module()
        decoder.embed_tokens = nn.Embedding(c.vocab, c.dim)
        nn.init.normal_(decoder.embed_tokens.weight, std=0.05)
        decoder.layers = nn.ModuleList(Layer(c, kind) for kind in c.layers)
        decoder.norm, decoder.self_conditioning = Norm(c.dim, c.eps), SelfConditioning(c)
        language = nn.Module()
        language.layers = nn.ModuleList(Scalar() for _ in c.layers)
        self.model = nn.ModuleDict({"decoder": decoder, "encoder": nn.ModuleDict({"language_model": language})})
        self._places: dict[int, Places] = {}

    def places(self, length: int) -> Places:
        if length not in self._places:
            self._places[length] = Places(self.c, length)
        return self._places[length]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        d = self.model["decoder"]
        return self.c.cap * torch.tanh(d.norm(x) @ d.embed_tokens.weight.T / self.c.cap)

    def encode(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[tuple]]:
        """ids: [B, L] -> hidden states before the final norm, and (k, v) of every layer."""
        d, places, past = self.model["decoder"], self.places(ids.shape[1]), []
        x = d.embed_tokens(ids) * self.c.dim**0.5
        for layer, own in zip(d.layers, self.model["encoder"]["language_model"].layers, strict=True):
            x, kv = layer(x, places, None, own.layer_scalar)
            past.append(kv)
        return x, past

    def denoise(self, noisy: torch.Tensor, probs: torch.Tensor | None, past: list[tuple]) -> torch.Tensor:
        """noisy: [B, L] ids; probs: [B, L, V] of the step before, or None -> logits [B, L, V]."""
        d, places = self.model["decoder"], self.places(noisy.shape[1])
        x = d.embed_tokens(noisy) * self.c.dim**0.5
        soft = torch.zeros_like(x) if probs is None else probs @ d.embed_tokens.weight * self.c.dim**0.5
        x = d.self_conditioning(x, soft)
        for layer, kv in zip(d.layers, past, strict=True):
            x, _ = layer(x, places, kv, layer.layer_scalar)
        return self.logits(x)
