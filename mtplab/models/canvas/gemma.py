"""DiffusionGemma, text only: one stack of weights that runs as a causal encoder and as a bidirectional decoder.

Written after the published config and the behaviour of `DiffusionGemmaForBlockDiffusion` (transformers 5), with which
tests compare it. Parameter paths are the checkpoint's names. What is easy to miss:

- Encoder and decoder pass share every weight but `layer_scalar`, of which each layer has two.
- Attention is not scaled. Full layers have head sizes of their own and no v_proj: values are the keys' projection
  under a norm without weight, and only a quarter of the rotary angles turn.
- A canvas sees all of itself in every layer; of the cache, sliding layers show it the last window - 1 rows.
- The self-conditioning module runs at the first step too, on zeros: its outer norm always applies.
- The cap on the logits is 30 unless the config says otherwise; it need not be in config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtplab.models.canvas.base import CanvasCache, Denoiser
from mtplab.models.canvas.config import FULL, SLIDING
from mtplab.models.canvas.config import GemmaArgs as Args
from mtplab.models.canvas.layers import Rope, Stacked, causal_mask, gelu, join, mix, rms


class Attention(nn.Module):
    def __init__(self, args: Args, kind: str):
        super().__init__()
        dim, heads, bias = args.hidden_size, args.num_attention_heads, args.attention_bias
        self._kv, self._size = args.heads(kind)
        self._eps, self._window = args.rms_norm_eps, args.sliding_window if kind == SLIDING else None
        self.q_proj = nn.Linear(dim, heads * self._size, bias=bias)
        self.k_proj = nn.Linear(dim, self._kv * self._size, bias=bias)
        if kind == SLIDING:
            self.v_proj = nn.Linear(dim, self._kv * self._size, bias=bias)
        self.o_proj = nn.Linear(heads * self._size, dim, bias=bias)
        self.q_norm = nn.RMSNorm(self._size, eps=args.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self._size, eps=args.rms_norm_eps)
        how = args.rope[kind]
        share = how.get("partial_rotary_factor", 1.0) if kind == FULL else None
        self._rope = Rope(self._size, how["rope_theta"], proportional=share, factor=how.get("factor", 1.0))

    def __call__(self, x: mx.array, past: Any, offset: int, causal: bool) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        """x: [1, L, D]. Returns the output and the rows to keep: those of `past` still in sight, then these."""
        _, rows, _ = x.shape
        q = self.q_norm(self.q_proj(x).reshape(1, rows, -1, self._size)).swapaxes(1, 2)
        k = self.k_proj(x).reshape(1, rows, self._kv, self._size)
        if "v_proj" in self:
            k, v = self.k_norm(k), rms(self.v_proj(x).reshape(k.shape), self._eps)
        else:  # one projection and one norm for both, and a weight for the keys
            v = rms(k, self._eps)
            k = v * self.k_norm.weight
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        keys, values = join(past, self._rope(k, offset), v)
        mask = causal_mask(rows, keys.shape[2], self._window) if causal else None
        y = mx.fast.scaled_dot_product_attention(self._rope(q, offset), keys, values, scale=1.0, mask=mask)
        if self._window is not None and keys.shape[2] >= self._window:
            keys, values = (a[:, :, 1 - self._window :] if self._window > 1 else a[:, :, :0] for a in (keys, values))
        return self.o_proj(y.swapaxes(1, 2).reshape(1, rows, -1)), (keys, values)


class MLP(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.gate_proj = nn.Linear(args.hidden_size, args.intermediate_size, bias=False)
        self.up_proj = nn.Linear(args.hidden_size, args.intermediate_size, bias=False)
        self.down_proj = nn.Linear(args.intermediate_size, args.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(gelu(self.gate_proj(x)) * self.up_proj(x))


class SelfConditioning(MLP):
    def __init__(self, args: Args):
        super().__init__(args)
        self.pre_norm, self._eps = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps), args.rms_norm_eps

    def __call__(self, embedded: mx.array, soft: mx.array | None) -> mx.array:
        """soft: the expected embedding of the step before; None is zeros, which the gated product leaves zero."""
        return rms(embedded if soft is None else embedded + super().__call__(self.pre_norm(soft)), self._eps)


class Router(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.proj = nn.Linear(args.hidden_size, args.num_experts, bias=False)
        self.scale, self.per_expert_scale = mx.ones((args.hidden_size,)), mx.ones((args.num_experts,))
        self._top, self._root = args.top_k_experts, args.hidden_size**-0.5

    def __call__(self, normed: mx.array) -> tuple[mx.array, mx.array]:
        """normed: [T, D] -> experts and weights, [T, k]. Softmax over all, renormalized, is one over the chosen."""
        scores = self.proj(normed * self.scale * self._root).astype(mx.float32)
        experts = mx.argpartition(scores, kth=-self._top, axis=-1)[:, -self._top :]
        weights = mx.softmax(mx.take_along_axis(scores, experts, axis=-1), axis=-1)
        return experts, (weights * self.per_expert_scale[experts]).astype(normed.dtype)


class Experts(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.gate_up_proj = Stacked(args.num_experts, args.hidden_size, 2 * args.moe_intermediate_size)
        self.down_proj = Stacked(args.num_experts, args.moe_intermediate_size, args.hidden_size)

    def __call__(self, x: mx.array, experts: mx.array, weights: mx.array) -> mx.array:
        def act(both: mx.array) -> mx.array:
            gate, up = mx.split(both, 2, axis=-1)
            return gelu(gate) * up

        return mix(x, experts, weights, (self.gate_up_proj,), act, self.down_proj)


class Layer(nn.Module):
    def __init__(self, args: Args, kind: str):
        super().__init__()
        self.self_attn, self.mlp = Attention(args, kind), MLP(args)
        self.router, self.experts = Router(args), Experts(args)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
            "pre_feedforward_layernorm_2",
        ):
            setattr(self, name, nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps))
        self.layer_scalar, self._eps = mx.ones((1,)), args.rms_norm_eps

    def __call__(self, x: mx.array, past: Any, offset: int, causal: bool, scalar: mx.array) -> tuple[mx.array, Any]:
        y, kept = self.self_attn(self.input_layernorm(x), past, offset, causal)
        x = x + self.post_attention_layernorm(y)
        # MLP, experts and router look at one normed residual stream, each through a weight of its own.
        normed = rms(x, self._eps)
        dense = self.post_feedforward_layernorm_1(self.mlp(normed * self.pre_feedforward_layernorm.weight))
        mixed = self.experts((normed * self.pre_feedforward_layernorm_2.weight)[0], *self.router(normed[0]))[None]
        y = self.post_feedforward_layernorm(dense + self.post_feedforward_layernorm_2(mixed))
        return (x + y) * scalar, kept


class Decoder(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Layer(args, kind) for kind in args.layer_types]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.self_conditioning = SelfConditioning(args)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_scalar = mx.ones((1,))


class Branch(nn.Module):
    """A node of the checkpoint's name tree that computes nothing."""

    def __init__(self, **children: Any):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


class DiffusionGemma(nn.Module):
    """The name tree of a checkpoint: `model.decoder.*` and `model.encoder.language_model.layers.N.layer_scalar`."""

    def __init__(self, args: Args):
        super().__init__()
        language = Branch(layers=[Scalar() for _ in args.layer_types])
        self.model = Branch(decoder=Decoder(args), encoder=Branch(language_model=language))
        self._scale, self._cap = args.hidden_size**0.5, args.final_logit_softcapping

    def embed(self, tokens: mx.array) -> mx.array:
        """tokens: [L] -> [1, L, D]."""
        return self.scaled(self.model.decoder.embed_tokens(tokens))

    def expect(self, weights: mx.array, first: int) -> mx.array:
        """Weights [C, n] of the ids from `first` on times their embeddings, [C, D]; a packed table stays packed."""
        table, rows = self.model.decoder.embed_tokens, slice(first, first + weights.shape[1])
        if isinstance(table, nn.QuantizedEmbedding):
            how = {"group_size": table.group_size, "bits": table.bits, "mode": table.mode}
            packed = (None if a is None else a[rows] for a in (table.weight, table.scales, table.get("biases")))
            return mx.quantized_matmul(weights, *packed, transpose=False, **how)
        return weights.astype(table.weight.dtype) @ table.weight[rows]

    def scaled(self, embedded: mx.array) -> mx.array:
        """Embeddings [L, D] as the first layer takes them, [1, L, D]: times the root of D, in the norms' dtype, since
        a packed table gives bfloat16."""
        return embedded[None].astype(self.model.decoder.norm.weight.dtype) * self._scale

    def run(self, x: mx.array, past: list[Any], offset: int, causal: bool) -> tuple[mx.array, list[Any]]:
        """x: [1, L, D] -> states before the final norm, and what every layer would keep."""
        decoder, own, kept = self.model.decoder, self.model.encoder.language_model.layers, []
        for layer, encoder, state in zip(decoder.layers, own, past, strict=True):
            scalar = encoder.layer_scalar if causal else layer.layer_scalar
            x, rows = layer(x, state, offset, causal, scalar)
            kept.append(rows)
        return x, kept

    def logits(self, x: mx.array) -> mx.array:
        """States before the final norm [1, L, D] -> capped float32 logits [L, V]."""
        out = self.model.decoder.embed_tokens.as_linear(self.model.decoder.norm(x[0])).astype(mx.float32)
        return mx.tanh(out / self._cap) * self._cap


class GemmaDenoiser(Denoiser):
    """DiffusionGemma behind the `Denoiser` surface."""

    start, self_conditioning, commit_order, scores = "uniform", True, "causal", True

    def __init__(self, config: dict[str, Any]):
        self.args = Args.read(config)
        self.model = DiffusionGemma(self.args)
        self.vocab, self.width = self.args.vocab_size, self.args.hidden_size
        self.canvas = self.args.canvas_length
        self.context = self.args.max_position_embeddings
        self.facts = {"layers": list(self.args.layer_types), "window": self.args.sliding_window}

    def prefill(self, tokens: Sequence[int], cache: CanvasCache, step: int = 512) -> int:
        self.check_ids(tokens)
        for at in range(0, len(tokens), step):
            self._encode(tokens[at : at + step], cache)
            mx.eval(cache.arrays())
        return -(-len(tokens) // step)

    def commit(self, tokens: Sequence[int], cache: CanvasCache) -> bool:
        self.check_ids(tokens)
        self._encode(tokens, cache)
        return True

    def _encode(self, tokens: Sequence[int], cache: CanvasCache) -> mx.array:
        x = self.model.embed(mx.array(list(tokens)))
        x, kept = self.model.run(x, cache.layers, cache.length, causal=True)
        cache.write(kept, len(tokens))
        return x

    def expect(self, weights: mx.array, first: int) -> mx.array:
        return self.model.expect(weights, first)

    def denoise(self, canvas: mx.array, soft: mx.array | None, cache: CanvasCache) -> mx.array:
        self.check_canvas(canvas, soft)
        given = None if soft is None else self.model.scaled(soft)
        x = self.model.model.decoder.self_conditioning(self.model.embed(canvas), given)
        return self.model.logits(self.model.run(x, cache.layers, cache.length, causal=False)[0])

    def encoder_logits(self, tokens: Sequence[int]) -> mx.array:
        self.check_ids(tokens)
        return self.model.logits(self._encode(tokens, self.new_cache()))
