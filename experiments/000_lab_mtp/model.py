"""The torch twin of a MiMo checkpoint (trunk and one MTP layer), for training only.

Parameter names are the published ones, so `state_dict` is the checkpoint. The head is trained the way it is
used: the query of depth d at row r sees the depth-1 rows up to r-d+1 (true trunk hiddens) and then its own
chain, exactly what the head's cache holds while drafting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    vocab: int = 4096
    dim: int = 192
    layers: int = 10
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 576
    theta: float = 10000.0
    eps: float = 1e-5

    def to_mimo(self) -> dict:
        """The published `config.json` of this model."""
        return {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "mimo",
            "hidden_size": self.dim,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.eps,
            "vocab_size": self.vocab,
            "max_position_embeddings": 4096,
            "rope_theta": self.theta,
            "tie_word_embeddings": True,
            "num_nextn_predict_layers": 1,
            "torch_dtype": "float16",
            "bos_token_id": 0,
            "eos_token_id": 0,
        }


def rotate(x: torch.Tensor, offset: int, theta: float) -> torch.Tensor:
    """Rotary embedding, halves split. x: [B, H, T, hd]."""
    half = x.shape[-1] // 2
    freq = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(offset, offset + x.shape[-2], dtype=torch.float32)[:, None] * freq
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c, hd = c, c.dim // c.heads
        self.q_proj = nn.Linear(c.dim, c.heads * hd, bias=True)
        self.k_proj = nn.Linear(c.dim, c.kv_heads * hd, bias=True)
        self.v_proj = nn.Linear(c.dim, c.kv_heads * hd, bias=True)
        self.o_proj = nn.Linear(c.heads * hd, c.dim, bias=False)

    def qkv(self, x: torch.Tensor, offset: int = 0):
        B, T, _ = x.shape
        c, rep = self.c, self.c.heads // self.c.kv_heads
        q = self.q_proj(x).view(B, T, c.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(B, T, c.kv_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(B, T, c.kv_heads, -1).transpose(1, 2)
        q, k = rotate(q, offset, c.theta), rotate(k, offset, c.theta)
        return q, k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)

    def out(self, y: torch.Tensor) -> torch.Tensor:
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class MLP(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.up_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.down_proj = nn.Linear(c.ffn, c.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = nn.RMSNorm(c.dim, eps=c.eps)
        self.post_attention_layernorm = nn.RMSNorm(c.dim, eps=c.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class MTPLayer(Block):
    """MiMo's `model.mtp_layers.0`: concat(hidden, embedding) -> projection -> block -> final norm."""

    def __init__(self, c: Config):
        super().__init__(c)
        self.token_layernorm = nn.RMSNorm(c.dim, eps=c.eps)
        self.hidden_layernorm = nn.RMSNorm(c.dim, eps=c.eps)
        self.input_proj = nn.Linear(2 * c.dim, c.dim, bias=False)
        self.final_layernorm = nn.RMSNorm(c.dim, eps=c.eps)

    def step(self, hidden: torch.Tensor, embedded: torch.Tensor, depth: int, chain: list) -> torch.Tensor:
        """One depth for all rows. Row j is row j of depth 1 shifted by depth-1; chain: (k, v) of earlier depths."""
        x = self.input_proj(torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], -1))
        q, k, v = self.self_attn.qkv(self.input_layernorm(x), depth - 1)
        if depth == 1:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = chained_attention(q, [*chain, (k, v)])
        chain.append((k, v))
        x = x + self.self_attn.out(y)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.final_layernorm(x)


def chained_attention(q: torch.Tensor, chain: list) -> torch.Tensor:
    """Query j sees rows <= j of depth 1 and row j (its own chain) of every later depth. q: [B, H, T, hd]."""
    T, scale = q.shape[-2], q.shape[-1] ** -0.5
    k1, v1 = chain[0][0][..., :T, :], chain[0][1][..., :T, :]
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    scores = (q @ k1.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
    own = [(q * k[..., :T, :]).sum(-1, keepdim=True) * scale for k, _ in chain[1:]]
    weights = torch.cat([scores, *own], -1).softmax(-1)
    y = weights[..., :T] @ v1
    for i, (_, v) in enumerate(chain[1:]):
        y = y + weights[..., T + i : T + i + 1] * v[..., :T, :]
    return y


class Inner(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.dim)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.dim, eps=c.eps)
        self.mtp_layers = nn.ModuleList([MTPLayer(c)])


class LabMTP(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c, self.model = c, Inner(c)
        self.apply(self._init)
        for block in [*self.model.layers, *self.model.mtp_layers]:
            for last in (block.self_attn.o_proj, block.mlp.down_proj):
                nn.init.zeros_(last.weight)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.05)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Post-final-norm hidden states. ids: [B, T] -> [B, T, D]."""
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.model.norm(x)

    def unembed(self, h: torch.Tensor) -> torch.Tensor:
        return h @ self.model.embed_tokens.weight.T

    def drafts(self, ids: torch.Tensor, hidden: torch.Tensor, depth: int = 3) -> list[torch.Tensor]:
        """Teacher-forced head logits per depth d; element [:, j] predicts token j + d + 1."""
        head, embedded = self.model.mtp_layers[0], self.model.embed_tokens(ids)
        T, chain, out, h = ids.shape[1], [], [], hidden
        for d in range(1, depth + 1):
            rows = T - d
            h = head.step(h[:, :rows], embedded[:, d : d + rows], d, chain)
            out.append(self.unembed(h))
        return out
