"""LLaDA 2 (`llada2_moe`): a mask-based denoiser. A canvas begins as masks, and blocks are committed seeing themselves.

Written after the published layout. One pass does everything: attention is causal between blocks of `block` absolute
positions and goes both ways inside one. Only whole blocks are written; committed tokens of a block that is not whole
yet wait in the cache's `tail` and run again with each canvas that continues their block, so the prompt's last tokens
and the first canvas see each other as in training. There is no causal pass, so this family scores no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtplab.errors import RequestError
from mtplab.models.canvas.base import CanvasCache, Denoiser
from mtplab.models.canvas.config import LladaArgs as Args
from mtplab.models.canvas.layers import Rope, Stacked, join, mix


class Attention(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self._heads, self._kv, self._size = args.num_attention_heads, args.num_key_value_heads, args.size
        together = (self._heads + 2 * self._kv) * self._size
        self.query_key_value = nn.Linear(args.hidden_size, together, bias=args.use_qkv_bias)
        if args.use_qk_norm:
            self.query_layernorm = nn.RMSNorm(self._size, eps=args.rms_norm_eps)
            self.key_layernorm = nn.RMSNorm(self._size, eps=args.rms_norm_eps)
        self.dense = nn.Linear(self._heads * self._size, args.hidden_size, bias=args.use_bias)
        self._rope = Rope(int(self._size * args.partial_rotary_factor), args.rope_theta)

    def __call__(self, x: mx.array, past: Any, offset: int, mask: mx.array | None) -> tuple[mx.array, Any]:
        """x: [1, L, D]. Returns the output and all keys and values, the past ones first."""
        _, rows, _ = x.shape
        each = self.query_key_value(x).reshape(1, rows, -1, self._size).swapaxes(1, 2)
        q, k, v = mx.split(each, [self._heads, self._heads + self._kv], axis=1)
        if "query_layernorm" in self:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        kept = join(past, self._rope(k, offset), v)
        y = mx.fast.scaled_dot_product_attention(self._rope(q, offset), *kept, scale=self._size**-0.5, mask=mask)
        return self.dense(y.swapaxes(1, 2).reshape(1, rows, -1)), kept


class MLP(nn.Module):
    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, inner, bias=False), nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.weight = mx.zeros((args.num_experts, args.hidden_size))
        self.expert_bias = mx.zeros((args.num_experts,))
        self._args = args

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x: [T, D] -> experts and weights, [T, k]. The bias takes part in the choice, not in the weights."""
        a = self._args
        scores = mx.sigmoid(x.astype(mx.float32) @ self.weight.astype(mx.float32).T)
        biased = scores + self.expert_bias
        # A group is as good as its two best experts; only the best groups may be chosen from.
        groups = mx.sort(biased.reshape(len(x), a.n_group, -1), axis=-1)[..., -2:].sum(axis=-1)
        allowed = mx.argsort(mx.argsort(groups, axis=-1), axis=-1) >= a.n_group - a.topk_group
        biased = mx.where(mx.repeat(allowed, a.num_experts // a.n_group, axis=-1), biased, -float("inf"))
        experts = mx.argpartition(biased, kth=-a.num_experts_per_tok, axis=-1)[:, -a.num_experts_per_tok :]
        weights = mx.take_along_axis(scores, experts, axis=-1)
        if a.num_experts_per_tok > 1:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return experts, (weights * a.routed_scaling_factor).astype(x.dtype)


class Experts(nn.Module):
    """All experts of a layer; the published tensors, one an expert, are stacked on loading."""

    def __init__(self, args: Args):
        super().__init__()
        inner, dim, total = args.moe_intermediate_size, args.hidden_size, args.num_experts
        self.gate_proj, self.up_proj = Stacked(total, dim, inner), Stacked(total, dim, inner)
        self.down_proj = Stacked(total, inner, dim)

    def __call__(self, x: mx.array, experts: mx.array, weights: mx.array) -> mx.array:
        into = (self.gate_proj, self.up_proj)
        return mix(x, experts, weights, into, lambda gate, up: nn.silu(gate) * up, self.down_proj)


class SparseMLP(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.gate, self.experts = Gate(args), Experts(args)
        if args.num_shared_experts:
            self.shared_experts = MLP(args.hidden_size, args.moe_intermediate_size * args.num_shared_experts)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.experts(x[0], *self.gate(x[0]))[None]
        return y + self.shared_experts(x) if "shared_experts" in self else y


class Layer(nn.Module):
    def __init__(self, args: Args, index: int):
        super().__init__()
        dim, dense = args.hidden_size, index < args.first_k_dense_replace
        self.attention = Attention(args)
        self.mlp = MLP(dim, args.intermediate_size) if dense else SparseMLP(args)
        self.input_layernorm = nn.RMSNorm(dim, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, past: Any, offset: int, mask: mx.array | None) -> tuple[mx.array, Any]:
        y, kept = self.attention(self.input_layernorm(x), past, offset, mask)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), kept


class Inner(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.word_embeddings = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Layer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class Llada(nn.Module):
    """The name tree of a checkpoint."""

    def __init__(self, args: Args):
        super().__init__()
        self.model, self._block = Inner(args), args.block_length
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def run(self, tokens: Sequence[int] | mx.array, past: list[Any], offset: int) -> tuple[mx.array, list[Any]]:
        """tokens: L ids from position `offset` on -> states after the final norm [L, D], all keys and values."""
        tokens = mx.array(tokens)
        x, kept = self.model.word_embeddings(tokens)[None].astype(self.model.norm.weight.dtype), []
        mask = self.block_mask(offset, tokens.shape[0])
        for layer, state in zip(self.model.layers, past, strict=True):
            x, rows = layer(x, state, offset, mask)
            kept.append(rows)
        return self.model.norm(x[0]), kept

    def block_mask(self, offset: int, rows: int) -> mx.array | None:
        """Row r sees everything up to the end of its own block. None where that is everything there is."""
        if offset // self._block == (offset + rows - 1) // self._block:
            return None
        end = (mx.arange(offset, offset + rows) // self._block + 1) * self._block
        return mx.arange(offset + rows)[None] < end[:, None]

    def unembed(self, x: mx.array) -> mx.array:
        return (self.lm_head(x) if "lm_head" in self else self.model.word_embeddings.as_linear(x)).astype(mx.float32)


class LladaDenoiser(Denoiser):
    """LLaDA 2 behind the `Denoiser` surface."""

    start, self_conditioning, commit_order, scores = "mask", False, "block", False

    def __init__(self, config: dict[str, Any]):
        self.args = Args.read(config)
        self.model = Llada(self.args)
        self.vocab, self.canvas, self.mask_id = self.args.vocab_size, self.args.block_length, self.args.mask_token_id
        self.context = self.args.max_position_embeddings
        self.facts = {"layers": ["full_attention"] * self.args.num_hidden_layers, "block": self.canvas}

    def room(self, cache: CanvasCache) -> int:
        return self.canvas - len(cache.tail)

    def prefill(self, tokens: Sequence[int], cache: CanvasCache, step: int = 512) -> int:
        self.check_ids(tokens)
        step, passes = self.chunk(step), 0
        for at in range(0, len(tokens), step):
            passes += self._write(tokens[at : at + step], cache)
            mx.eval(cache.arrays())
        return passes

    def chunk(self, step: int) -> int:
        """Whole blocks."""
        return max(step // self.canvas, 1) * self.canvas

    def commit(self, tokens: Sequence[int], cache: CanvasCache) -> bool:
        self.check_ids(tokens)
        return self._write(tokens, cache)

    def _write(self, tokens: Sequence[int], cache: CanvasCache) -> bool:
        """Run and keep the whole blocks of tail ++ tokens; the rest becomes the tail. Was there a block to run?"""
        given = (*cache.tail, *tokens)
        whole = len(given) // self.canvas * self.canvas
        if whole:
            _, kept = self.model.run(given[:whole], cache.layers, cache.length)
            cache.write(kept, whole)
        cache.tail = given[whole:]
        return bool(whole)

    def denoise(self, canvas: mx.array, soft: mx.array | None, cache: CanvasCache) -> mx.array:
        """As `Denoiser.denoise`. The mask's own logit is -inf: a mask is no answer."""
        self.check_canvas(canvas, soft)
        tail = len(cache.tail)
        rows = mx.concatenate([mx.array(cache.tail, canvas.dtype), canvas]) if tail else canvas
        x, _ = self.model.run(rows, cache.layers, cache.length)
        return mx.where(mx.arange(self.vocab) == self.mask_id, -float("inf"), self.model.unembed(x[tail:]))

    def encoder_logits(self, tokens: Sequence[int]) -> mx.array:
        raise RequestError("this model has no causal pass to score a text with; name an autoregressive scoring model")
