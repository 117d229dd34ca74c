"""The MTP head: one module for every family in `families`.

Head-cache row t holds (hidden[t], token[t+1]); the output of row t predicts token t+2. Depth d feeds the previous
depth's state with the token just drafted as the next row. A head with several layers uses layer (d-1) mod n at
depth d, each with a cache of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mtplab.errors import ModelError
from mtplab.models import vlm
from mtplab.models.cache import flatten, leaf_arrays
from mtplab.models.headspec import HeadSpec
from mtplab.models.mlxlm import cache_module
from mtplab.models.target import Target


class Chain(nn.Module):
    """A head layer of several blocks (Nemotron-H): attention blocks take mask and cache, the others neither."""

    def __init__(self, block_class: type, args: Any, pattern: str):
        super().__init__()
        self.parts = [block_class(args, kind) for kind in pattern]
        self._pattern = pattern

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        caches = iter([None] * len(self.parts) if cache is None else flatten(cache))
        for part, kind in zip(self.parts, self._pattern, strict=True):
            x = part(x, mask, next(caches)) if kind == "*" else part(x)
        return x


def build_block(spec: HeadSpec, args: Any, layer: int) -> nn.Module:
    """The decoder block of head layer `layer`: an instance of the trunk's own class."""
    module, name = spec.block_class.rsplit(".", 1)
    block_class = getattr(importlib.import_module(module if "." in module else f"mlx_lm.models.{module}"), name)
    if spec.pattern is not None:
        return Chain(block_class, args, spec.pattern)
    if spec.block_index == "none":
        return block_class(args)
    index = args.full_attention_interval - 1 if spec.block_index == "full" else args.num_hidden_layers + layer
    types = getattr(args, "layer_types", None)
    if spec.block_index == "next" and types and len(types) <= index:
        raise ModelError(f"config.json's layer_types has {len(types)} entries; MTP layer {index} needs one, too")
    return block_class(args, index)


class HeadLayer(nn.Module):
    """norms, fusion, one decoder block of the trunk's class, final norm; its own (un)embedding where it has one."""

    def __init__(self, spec: HeadSpec, args: Any, layer: int = 0):
        super().__init__()
        dim, eps = args.hidden_size, getattr(args, "rms_norm_eps", None) or args.layer_norm_epsilon
        self._streams = getattr(args, spec.streams) if spec.streams else 0
        norm = vlm.norm if self._streams else nn.RMSNorm
        self.embed_norm = norm(dim, eps=eps)
        self.hidden_norm = norm(dim * (self._streams or 1), eps=eps)
        self.proj = nn.Linear(dim if spec.embed_proj else 2 * dim, dim, bias=False)
        if spec.embed_proj:
            self.embed_proj = nn.Linear(dim, dim, bias=False)
        self.block = build_block(spec, args, layer)
        self.final_norm = vlm.mixer(args) if self._streams else norm(dim, eps=eps)
        self._fuse_hidden_first = spec.fusion == "he"
        attention = getattr(self.block, "self_attn", None)
        self._window = args.sliding_window if getattr(attention, "is_sliding", False) else None
        self._mask_array = hasattr(attention, "kv_lora_rank")  # MLA adds its mask to scores of its own
        self._caches = 2 if hasattr(attention, "indexer") else (spec.pattern or "*").count("*")

    def new_cache(self) -> Any:
        """A KV cache, or several where the layer has several attentions or an indexer."""
        lm = cache_module()
        if self._streams:
            return vlm.cache_classes()[0]()
        # Plain also under a sliding window: rejected rows must come off, and a full ring cannot be trimmed.
        return lm.KVCache() if self._caches == 1 else lm.CacheList(*(lm.KVCache() for _ in range(self._caches)))

    def _mask(self, rows: int, cache: Any) -> Any:
        if cache is not None:
            leaf = (flatten(cache) or [None])[0]
            return leaf and leaf.make_mask(rows, window_size=self._window, return_array=self._mask_array)
        if rows == 1:
            return None
        if self._window is None and not self._mask_array:
            return "causal"
        return cache_module().create_attention_mask(rows, 0, True, self._window)

    def __call__(self, hidden: mx.array, embedded: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """hidden: [1, m, D], or [1, m, S D] of S streams; embedded: [1, m, D] -> (block output, shaped as hidden,
        normed output [1, m, D])."""
        x = self._fuse(self.embed_norm(embedded), self.hidden_norm(hidden))
        y = self.block(x, self._mask(x.shape[1], cache), cache)
        return y, self.final_norm(y)

    def _fuse(self, e: mx.array, h: mx.array) -> mx.array:
        if not self._streams:
            return self.proj(mx.concatenate([h, e] if self._fuse_hidden_first else [e, h], axis=-1))
        streams = self.proj(h.reshape(*h.shape[:-1], self._streams, -1))
        return (streams + self.embed_proj(e)[..., None, :]).reshape(h.shape)


class Head(nn.Module):
    """All head layers of a checkpoint plus the trunk's embedding and unembedding (shared, not copied)."""

    def __init__(self, spec: HeadSpec, args: Any, layers: int, target: Target):
        super().__init__()
        self.layers = [HeadLayer(spec, args, i) for i in range(layers)]
        self._spec, self._target, self._dim = spec, target, args.hidden_size
        self._width = self._dim * (getattr(args, spec.streams) if spec.streams else 1)  # of a hidden state
        self._file_names: tuple[tuple[str, str], ...] = ()  # parameter path, name in the checkpoint
        self.norms = "as used"  # how the file stores norm weights: raw (zero-centred), shifted, or as all families else

    @property
    def spec(self) -> HeadSpec:
        return self._spec

    def effective(self) -> dict[str, Any]:
        """The row as it is used, the number of layers and the norm convention of the file, for the record."""
        return self._spec.effective() | {"layers": len(self.layers), "norms": self.norms}

    @property
    def file_names(self) -> dict[str, str]:
        """Name in the checkpoint of every parameter path."""
        return dict(self._file_names)

    def new_cache(self) -> list[Any]:
        """One cache per head layer."""
        return [layer.new_cache() for layer in self.layers]

    def arrays(self, cache: list[Any]) -> list[mx.array]:
        """Every array of a head cache, for `mx.eval`."""
        return [a for layer in cache for leaf in flatten(layer) for a in leaf_arrays(leaf)]

    def rows(
        self, tokens: mx.array, hidden: mx.array, cache: list[Any] | None, depth: int = 1
    ) -> tuple[mx.array, mx.array]:
        """Feed rows (hidden[t], token[t+1]). tokens: [m], hidden: [m, D] -> (next depth's hidden, normed), [m, D]; a
        hidden state of S streams is [m, S D]."""
        if hidden.shape[-1] != self._width:
            raise ModelError(f"the head takes hidden states of {self._width}, but the trunk gives {hidden.shape[-1]}")
        i = (depth - 1) % len(self.layers)
        own = getattr(self.layers[i], "embed", None)
        embedded = self._target.embed(tokens) if own is None else own(tokens)
        block, normed = self.layers[i](hidden[None], embedded[None], None if cache is None else cache[i])
        return (normed if self._spec.recursion == "final" else block)[0], normed[0]

    def logits(self, normed: mx.array, depth: int = 1) -> mx.array:
        """normed: [m, D] -> [m, V] through the unembedding of depth's layer, or the trunk's."""
        own = getattr(self.layers[(depth - 1) % len(self.layers)], "unembed", None)
        return self._target.unembed(normed) if own is None else own(normed)


def choose_prefix(spec: HeadSpec, names: Mapping[str, Any] | set[str]) -> str:
    """The first declared prefix under which the fusion projection exists, else the first."""
    return next((p for p in spec.prefixes if f"{spec.name('proj', p, 0)}.weight" in names), spec.prefixes[0])


def tensor_name(spec: HeadSpec, prefix: str, path: str) -> str:
    """Checkpoint name of a parameter path of the head, e.g. layers.0.block.mlp.up_proj.weight."""
    _, layer, part, rest = path.split(".", 3)
    block = 0
    if part == "block" and spec.pattern is not None:
        _, number, rest = rest.split(".", 2)
        block = int(number)
    return f"{spec.name(part, prefix, int(layer), block)}.{rest}"


def expected_names(spec: HeadSpec, head: Head, prefix: str) -> dict[str, str]:
    """checkpoint name -> parameter path inside `head`."""
    return {tensor_name(spec, prefix, path): path for path, _ in tree_flatten(head.parameters())}
