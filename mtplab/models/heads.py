"""The MTP head: one module for every family in `headspec`.

Head-cache row t holds (hidden[t], token[t+1]); the output of row t predicts token t+2. Depth d feeds the previous
depth's state with the token just drafted as the next row. A head with several layers uses layer (d-1) mod n at
depth d, each with a cache of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mtplab.errors import ModelError
from mtplab.models.headspec import HeadSpec, head_names
from mtplab.models.mlxlm import cache_module
from mtplab.models.target import Target

WITHOUT_HEAD = "run the arms that need no head (baseline, depth0, ngramN)"


class HeadLayer(nn.Module):
    """norms, fusion, one decoder layer of the trunk's class, final norm."""

    def __init__(self, spec: HeadSpec, args: Any):
        super().__init__()
        dim, eps = args.hidden_size, args.rms_norm_eps
        self.embed_norm = nn.RMSNorm(dim, eps=eps)
        self.hidden_norm = nn.RMSNorm(dim, eps=eps)
        self.proj = nn.Linear(2 * dim, dim, bias=False)
        self.block = spec.block_layer(args)
        self.final_norm = nn.RMSNorm(dim, eps=eps)
        self._fuse_hidden_first = spec.fusion == "he"

    def __call__(self, hidden: mx.array, embedded: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """hidden, embedded: [1, m, D] -> (block output, normed output), each [1, m, D]."""
        e, h = self.embed_norm(embedded), self.hidden_norm(hidden)
        x = self.proj(mx.concatenate([h, e] if self._fuse_hidden_first else [e, h], axis=-1))
        mask = cache.make_mask(x.shape[1], window_size=None, return_array=False) if cache is not None else None
        if cache is None and x.shape[1] > 1:
            mask = "causal"
        y = self.block(x, mask, cache)
        return y, self.final_norm(y)


class Head(nn.Module):
    """All head layers of a checkpoint plus the trunk's embedding and unembedding (shared, not copied)."""

    def __init__(self, spec: HeadSpec, args: Any, layers: int, target: Target):
        super().__init__()
        self.layers = [HeadLayer(spec, args) for _ in range(layers)]
        self._spec, self._target, self._dim = spec, target, args.hidden_size
        self._file_names: tuple[tuple[str, str], ...] = ()  # parameter path, name in the checkpoint

    @property
    def spec(self) -> HeadSpec:
        return self._spec

    @property
    def file_names(self) -> dict[str, str]:
        """Name in the checkpoint of every parameter path."""
        return dict(self._file_names)

    def new_cache(self) -> list[Any]:
        """One plain KV cache per head layer."""
        return [cache_module().KVCache() for _ in self.layers]

    def rows(
        self, tokens: mx.array, hidden: mx.array, cache: list[Any] | None, depth: int = 1
    ) -> tuple[mx.array, mx.array]:
        """Feed rows (hidden[t], token[t+1]). tokens: [m], hidden: [m, D] -> (next depth's hidden, normed), [m, D]."""
        if hidden.shape[-1] != self._dim:
            raise ModelError(f"the head takes hidden states of {self._dim}, but the trunk gives {hidden.shape[-1]}")
        i = (depth - 1) % len(self.layers)
        embedded = self._target.embed(tokens)
        block, normed = self.layers[i](hidden[None], embedded[None], None if cache is None else cache[i])
        return (normed if self._spec.recursion == "final" else block)[0], normed[0]

    def logits(self, normed: mx.array) -> mx.array:
        """normed: [m, D] -> [m, V] through the trunk's unembedding."""
        return self._target.unembed(normed)


def tensor_name(spec: HeadSpec, prefix: str, layer: int, path: str) -> str:
    """Checkpoint name of a parameter of head layer `layer`, e.g. block.mlp.up_proj.weight."""
    part, _, rest = path.partition(".")
    return getattr(spec, part).format(p=prefix, i=layer) + "." + rest


def choose_prefix(spec: HeadSpec, names: Mapping[str, Any] | set[str]) -> str:
    """The first declared prefix under which the fusion projection exists, else the first."""
    for prefix in spec.prefixes:
        stem = spec.proj.format(p=prefix, i=0)
        if f"{stem}.weight" in names:
            return prefix
    return spec.prefixes[0]


def expected_names(spec: HeadSpec, head: Head, prefix: str) -> dict[str, str]:
    """checkpoint name -> parameter path inside `head`."""
    out = {}
    for i, layer in enumerate(head.layers):
        for path, _ in tree_flatten(layer.parameters()):
            out[tensor_name(spec, prefix, i, path)] = f"layers.{i}.{path}"
    return out


def quantize_as_stored(head: Head, spec: HeadSpec, prefix: str, weights: Mapping[str, mx.array], config: dict) -> None:
    """Turn the linears that the file stores quantized into quantized ones; kind from the config, checked on tensors."""
    for i, layer in enumerate(head.layers):

        def kind(path: str, module: nn.Module, i: int = i) -> bool | dict:
            stem = tensor_name(spec, prefix, i, path + ".").rstrip(".")
            if f"{stem}.scales" not in weights or not hasattr(module, "to_quantized"):
                return False
            return stored_kind(stem, module.weight.shape[-1], weights, config)

        nn.quantize(layer, class_predicate=kind)


def stored_kind(stem: str, in_dims: int, weights: Mapping[str, mx.array], config: dict) -> dict[str, Any]:
    """{"group_size", "bits", "mode"} of a stored linear; the config's word is checked against the tensors."""
    scales, packed = weights[f"{stem}.scales"], weights[f"{stem}.weight"]
    bits, group = packed.shape[-1] * 32 // in_dims, in_dims // scales.shape[-1]
    modes = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}
    mode = "affine" if scales.dtype != mx.uint8 else modes.get((bits, group), "unknown")
    found = {"group_size": group, "bits": bits, "mode": mode}
    declared = _declared_kind(stem, config)
    if declared is not None and any(declared.get(k, v) != v for k, v in found.items()):
        raise ModelError(f"{stem} is declared as {declared} in config.json but its tensors are {found}")
    return found


def _declared_kind(stem: str, config: dict) -> dict[str, Any] | None:
    """The config's word on one module: its own entry under any prefix in use, else None (the global one may be
    about the trunk only)."""
    table = config.get("quantization") or config.get("quantization_config") or {}
    for prefix in ("", "model.", "language_model.", "language_model.model.", "model.language_model."):
        for name in (prefix + stem, stem.removeprefix(prefix)):
            if isinstance(table.get(name), dict):
                return table[name]
    return None


def load_head(
    spec: HeadSpec,
    layers: int,
    args: Any,
    target: Target,
    weights: Mapping[str, mx.array],
    config: dict,
    *,
    raw_norms: bool | None = None,
) -> Head:
    """Build and fill a head, strictly: a missing or left-over head tensor or a wrong shape is an error naming it.

    `weights` are the checkpoint's tensors under their file names; `raw_norms` says whether zero-centred norm
    weights are stored as such (None: decided from their means, refused where they do not tell).
    """
    head, prefix = Head(spec, args, layers, target), choose_prefix(spec, set(weights))
    quantize_as_stored(head, spec, prefix, weights, config)
    names = expected_names(spec, head, prefix)
    missing = sorted(set(names) - set(weights))
    left = sorted(set(head_names(spec, weights)) - set(names))
    if missing:
        raise ModelError(f"the MTP head lacks {_listing(missing)}; {WITHOUT_HEAD}")
    if left:
        raise ModelError(f"the checkpoint has head tensors nobody uses: {_listing(left)}; is the layer count right?")
    shapes = {path: a.shape for path, a in tree_flatten(head.parameters())}
    for name, path in names.items():
        if weights[name].shape != shapes[path]:
            raise ModelError(f"{name} has shape {list(weights[name].shape)}, the head needs {list(shapes[path])}")
    chosen = {path: weights[name] for name, path in names.items()}
    if spec.zero_centred:
        chosen = centre_norms(chosen, raw_norms)
    head.load_weights(list(chosen.items()), strict=True)
    head._file_names = tuple((path, name) for name, path in names.items())
    head.eval()
    return head


def _listing(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def centre_norms(weights: dict[str, mx.array], raw: bool | None) -> dict[str, mx.array]:
    """Add one to zero-centred norm weights. Unshifted, a head loads without a sound and accepts about nothing."""
    norms = [p for p, a in weights.items() if a.ndim == 1 and "norm" in p]
    mean = sum(weights[p].astype(mx.float32).mean().item() for p in norms) / len(norms)
    if raw is None:
        if 0.4 <= mean <= 0.7:
            raise ModelError(
                f"cannot tell whether the head's norm weights (mean {mean:.2f}) are zero-centred; "
                "use --head-norms raw or --head-norms shifted"
            )
        raw = mean < 0.4
    return {p: a + 1.0 if raw and p in norms else a for p, a in weights.items()}
