"""Fill a head from a checkpoint's tensors, strictly: what is missing, left over or misshapen is an error naming it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mtplab.errors import ModelError
from mtplab.models import kinds, layouts
from mtplab.models.heads import Head, choose_prefix, tensor_name
from mtplab.models.headspec import RAW_BELOW, SHIFTED_ABOVE, HeadSpec, head_names
from mtplab.models.target import Target

WITHOUT_HEAD = "run the arms that need no head (baseline, depth0, ngramN)"
# Everything but the block.
FIXED = ("embed_norm", "hidden_norm", "proj", "embed_proj", "final_norm", "unembed", "embed")


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
    """Build and fill a head.

    `weights` are the head's tensors under their file names; `raw_norms` says whether zero-centred norm weights are
    stored as such (None: decided from their means, refused where they do not tell).
    """
    head, weights = Head(spec, args, layers, target), layouts.from_fp8(weights)
    prefix = choose_prefix(spec, weights)
    own_embeddings(head, prefix, weights)
    chosen, used = collect(head, args, prefix, weights)
    quantize_as_stored(head, prefix, chosen, config)
    shapes = {path: a.shape for path, a in tree_flatten(head.parameters())}
    missing = sorted(tensor_name(spec, prefix, path) for path in set(shapes) - set(chosen))
    extra = {tensor_name(spec, prefix, path) for path in set(chosen) - set(shapes)}
    left = sorted(extra | (set(head_names(spec, weights)) - used))
    if missing:
        raise ModelError(f"the MTP head lacks {_listing(missing)}; {WITHOUT_HEAD}")
    if left:
        raise ModelError(f"the checkpoint has head tensors nobody uses: {_listing(left)}; is the layer count right?")
    for path, a in chosen.items():
        if a.shape != shapes[path]:
            name = tensor_name(spec, prefix, path)
            raise ModelError(f"{name} has shape {list(a.shape)}, the head needs {list(shapes[path])}")
    if spec.zero_centred:
        chosen, head.norms = centre_norms(chosen, raw_norms, lambda path: tensor_name(spec, prefix, path))
    head.load_weights(list(chosen.items()), strict=True)
    head._file_names = tuple((path, tensor_name(spec, prefix, path)) for path in chosen)
    head.eval()
    return head


def _listing(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def own_embeddings(head: Head, prefix: str, weights: Mapping[str, mx.array]) -> None:
    """Give a layer its own (un)embedding where the file has one that is not just a copy of the trunk's."""
    target = head._target
    for i, layer in enumerate(head.layers):
        for part in ("embed", "unembed"):
            stored = _under(head.spec, part, prefix, i, weights)
            if not stored or _same(stored, target.embedding if part == "embed" else target.unembedding):
                continue
            rows = next(iter(stored.values())).shape[0]
            wanted = target.vocab if part == "embed" else target.unembedding_size()
            if rows != wanted:
                # Ids past the trunk's table would be read from the memory behind it.
                name = head.spec.name(part, prefix, i)
                raise ModelError(f"{name} has {rows} rows where the trunk's table has {wanted}")
            dims = head._dim
            module = nn.Embedding(rows, dims) if part == "embed" else nn.Linear(dims, rows, bias=False)
            setattr(layer, part, module)


def _under(spec: HeadSpec, part: str, prefix: str, layer: int, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of one part by what follows its name."""
    if getattr(spec, part) is None:
        return {}
    stem = spec.name(part, prefix, layer) + "."
    return {n[len(stem) :]: a for n, a in weights.items() if n.startswith(stem)}


def _same(stored: Mapping[str, mx.array], module: nn.Module) -> bool:
    """Do the stored tensors repeat the trunk's module? Equal copies are then read through it: weights exist once."""
    kept = {n: a for n, a in module.parameters().items() if isinstance(a, mx.array)}
    if set(kept) != set(stored) or any(kept[n].shape != a.shape for n, a in stored.items()):
        return False
    return all(mx.array_equal(kept[n], a.astype(kept[n].dtype)).item() for n, a in stored.items())


def collect(
    head: Head, args: Any, prefix: str, weights: Mapping[str, mx.array]
) -> tuple[dict[str, mx.array], set[str]]:
    """(parameter path -> tensor, the file names that were used), block by block through `layouts`."""
    spec, chosen, used = head.spec, {}, set()
    for i, layer in enumerate(head.layers):
        for part in FIXED:
            stored = _under(spec, part, prefix, i, weights)
            used |= {f"{spec.name(part, prefix, i)}.{rest}" for rest in stored}
            if part not in ("unembed", "embed") or hasattr(layer, part):
                chosen |= {f"layers.{i}.{part}.{rest}": a for rest, a in stored.items()}
    parameters = [path for path, _ in tree_flatten(head.parameters())]
    for i in range(len(head.layers)):
        for b in range(len(spec.pattern or "x")):
            name = spec.name("block", prefix, i, b)
            stored = {n: a for n, a in weights.items() if n.startswith(name + ".") and n not in used}
            used |= set(stored)
            root = f"layers.{i}.block." + (f"parts.{b}." if spec.pattern else "")
            wanted = {p[len(root) :] for p in parameters if p.startswith(root)}
            inside = layouts.to_module_names({n[len(name) + 1 :]: a for n, a in stored.items()}, wanted, args, name)
            chosen |= {root + rest: a for rest, a in inside.items()}
    return chosen, used


def quantize_as_stored(head: Head, prefix: str, chosen: Mapping[str, mx.array], config: dict) -> None:
    """Turn the modules that the file stores quantized into quantized ones; kind from the tensors, config checked."""

    def kind(path: str, module: nn.Module) -> bool | dict:
        stem = tensor_name(head.spec, prefix, path + ".").rstrip(".")
        if f"{path}.scales" not in chosen or f"{path}.weight" not in chosen or not hasattr(module, "to_quantized"):
            return False
        packed, scales = chosen[f"{path}.weight"], chosen[f"{path}.scales"]
        if packed.dtype != mx.uint32:
            raise ModelError(f"{stem}.weight is {packed.dtype} beside scales; packed weights are uint32")
        shape = module.weight.shape
        found = kinds.found_kind(stem, packed.shape[-1], scales.shape[-1], scales.dtype != mx.uint8, shape[-1])
        kinds.check(stem, found, config)
        return found

    nn.quantize(head, class_predicate=kind)


def centre_norms(weights: dict[str, mx.array], raw: bool | None, name: Any) -> tuple[dict[str, mx.array], str]:
    """(weights, convention found) with one added to zero-centred norm weights. Unshifted, a head loads without a sound
    and accepts about nothing."""
    norms = [p for p, a in weights.items() if a.ndim == 1 and "norm" in p]
    means = {p: weights[p].astype(mx.float32).mean().item() for p in norms}
    mean = sum(means.values()) / len(norms)
    if raw is None:
        if RAW_BELOW <= mean <= SHIFTED_ABOVE:
            raise ModelError(
                f"cannot tell whether the head's norm weights ({name(norms[0])} and the rest, mean {mean:.2f}) are "
                "zero-centred; use --head-norms raw or --head-norms shifted"
            )
        raw = mean < RAW_BELOW
    return {p: a + 1.0 if raw and p in norms else a for p, a in weights.items()}, "raw" if raw else "shifted"
