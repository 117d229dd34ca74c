"""Every module's output while a model runs, and how two outputs differ in bits.

Modules are named by their path in the checkpoint; a tied embedding used as the unembedding is its own entry
(`model.embed_tokens` with kind "unembedding"). Instances are wrapped and unwrapped, also after an exception.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtplab.models.cache import Cache, flatten, kind
from mtplab.models.tap import tap
from mtplab.models.target import with_cache

KINDS = (
    "embedding", "linear", "quantized linear", "cache", "attention", "recurrent mixer", "norm", "router", "experts",
    "unembedding", "block", "other",
)  # fmt: skip
# A value next to the edge of a quantization step falls on either side of it, and the largest of a group sets the whole
# group's scale and offset anew: what hardly differs comes back so many steps apart at most.
STEPS = 3.0
UINT = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}


@dataclass(frozen=True, slots=True)
class Difference:
    """How two arrays of one dtype differ. `ulp_max` counts representable values in between (0 where bits are equal)."""

    equal: bool
    elements: int
    differ: int
    ulp_max: int
    abs_max: float
    relative: float = 0.0  # |a - b| / |b|, as whole arrays


def difference(a: mx.array, b: mx.array) -> Difference:
    """Bitwise comparison of two arrays of one shape and dtype. A NaN equals a NaN of the same bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"{a.dtype} {a.shape} cannot be compared with {b.dtype} {b.shape}")
    if a.size == 0:
        return Difference(True, 0, 0, 0, 0.0)
    if not mx.issubdtype(a.dtype, mx.floating):
        # Ids that a top-k chose have no size, and the same ones in another order are the same choice.
        differ, other = mx.sum(a != b).item(), mx.any(mx.sort(a) != mx.sort(b)).item()
        return Difference(differ == 0, a.size, differ, 0, float(differ > 0), float(other))
    differ = mx.sum(bits(a) != bits(b))
    steps = mx.max(mx.abs(ordered(a) - ordered(b)))
    gap, part = mx.max(mx.abs(a.astype(mx.float32) - b.astype(mx.float32))), share(a, b)
    mx.eval(differ, steps, gap, part)
    return Difference(differ.item() == 0, a.size, differ.item(), steps.item(), gap.item(), part.item())


def share(a: mx.array, b: mx.array, *, spare: mx.array | float = 0.0, axis: int | None = None) -> mx.array:
    """|a - b| / |b|, as whole arrays or along an axis; without `spare` (of their shape) in every element."""
    size = b.astype(mx.float32)
    over = mx.maximum(mx.abs(a.astype(mx.float32) - size) - spare, 0)
    return mx.sqrt((over * over).sum(axis=axis) / ((size * size).sum(axis=axis) + 1e-30))


def bits(a: mx.array) -> mx.array:
    return mx.contiguous(a).view(UINT[a.itemsize])


def ordered(a: mx.array) -> mx.array:
    """Integers in the order of the values, one apart where the values are neighbours; -0 and +0 are both 0."""
    raw = bits(a).astype(mx.int64)
    sign = 1 << (8 * a.itemsize - 1)
    return mx.where(raw >= sign, sign - raw, raw)


@dataclass(frozen=True, slots=True)
class Seen:
    """One call of one module: the first array it returned, as it left the module."""

    path: str
    call: int  # of this module in this pass, from 0
    kind: str
    output: mx.array
    input: mx.array | None = None  # the first array it was given
    ids: mx.array | None = None  # the first array of integers that it was given, or returned: a router's choice
    step: mx.array | None = None  # of a quantized cache: the quantization step of every element of the output


def kinds(model: nn.Module, cache_layers: list[Any] | None = None) -> dict[str, str]:
    """path -> one of KINDS, for every module with a name of its own. The attention and the mixer of a layer are found
    by their name (`attn`, `attention`, `mixer`) and the children inside; which of the two, by the cache's kind."""
    out = {}
    named = [(p, m) for p, m in model.named_modules() if p]
    for path, module in named:
        out[path] = _kind(path, module)
    if cache_layers is not None:
        for path, layer in zip(cache_paths(model, len(cache_layers)), cache_layers, strict=True):
            if any(kind(leaf) == "state" for leaf in flatten(layer)):
                out |= {p: "recurrent mixer" for p, k in out.items() if k == "attention" and p.startswith(path + ".")}
    return out


def layer_paths(model: nn.Module) -> list[str]:
    """The path of every decoder layer, in order."""
    return _paths(model, model.layers)


def cache_paths(model: nn.Module, count: int) -> list[str]:
    """The path of the layer that each of the model's `count` caches belongs to."""
    return _paths(model, with_cache(model, count))


def _paths(model: nn.Module, layers: Sequence[nn.Module]) -> list[str]:
    paths: dict[int, str] = {}
    for path, module in model.named_modules():
        paths.setdefault(id(module), path)
    return [paths.get(id(layer), f"layers.{i}") for i, layer in enumerate(layers)]


ROUTERS = ("gate", "router")


def _kind(path: str, module: nn.Module) -> str:
    last, name = path.rsplit(".", 1)[-1], type(module).__name__
    leaf = not module.children() or not _has_modules(module)
    if last == "lm_head":
        return "unembedding"
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return "embedding"
    if last in ROUTERS and leaf:
        return "router"
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.QuantizedLinear):
        return "quantized linear"
    if "norm" in name.lower():
        return "norm"
    if name.startswith("Switch") and not leaf:
        return "experts"
    if not leaf and ("attn" in last or "attention" in last):
        return "attention"
    if not leaf and "mixer" in last:
        return "recurrent mixer"
    return "other" if leaf else "block"


def _has_modules(module: nn.Module) -> bool:
    return len(module.modules()) > 1


def first_array(value: Any) -> mx.array | None:
    if isinstance(value, mx.array):
        return mx.array(value)  # a model may go on with `h *= ...`, which changes the object that was seen
    if isinstance(value, (tuple, list)):
        return next((a for v in value if (a := first_array(v)) is not None), None)
    return None


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _whole(value: Any) -> bool:
    return isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.integer)


def held(a: mx.array) -> mx.array:
    """The array as it is now. A model may write into the one it got (gemma scales its embeddings with `h *= ...`)."""
    return mx.stop_gradient(a)


@contextmanager
def watching(model: nn.Module, observer: Callable[[Seen], None], names: dict[str, str] | None = None) -> Iterator[None]:
    """Report every module's output to `observer`, in the order in which they finish. `names`: path -> kind [all]."""
    names = kinds(model) if names is None else names
    calls: dict[tuple[str, str], int] = {}
    restore = []

    def report(path: str, kind: str) -> Callable[[tuple, dict, Any], None]:
        def seen(args: tuple, kwargs: dict, out: Any) -> None:
            array, given, key = first_array(out), first_array((*args, *kwargs.values())), (path, kind)
            if array is not None:
                ids = first_array([v for v in (*args, *kwargs.values(), *_flat(out)) if _whole(v)])
                call = calls.get(key, 0)
                observer(Seen(path, call, kind, held(array), *(None if a is None else held(a) for a in (given, ids))))
                calls[key] = calls.get(key, 0) + 1

        return seen

    try:
        # mlx-lm's SwitchGLU layers share one activation: its calls belong to no path of their own. A layer that the
        # model runs twice goes by its first path.
        owners, met = Counter(id(m) for _, m in model.named_modules()), set()
        for path, module in model.named_modules():
            shared = owners[id(module)] > 1 and (id(module) in met or not module.parameters())
            met.add(id(module))
            if path in names and not shared:
                restore.append(tap(module, report(path, names[path])))
                if names[path] == "embedding":
                    restore.append(tap(module, report(path, "unembedding"), "as_linear"))
        yield
    finally:
        for undo in reversed(restore):
            undo()


@contextmanager
def watching_cache(model: nn.Module, cache: Cache, observer: Callable[[Seen], None]) -> Iterator[None]:
    """Report the rows that quantized caches are given, as they hold them."""
    restore, calls = [], Counter()  # a layer that the model runs twice has two caches
    try:
        for path, layer in zip(cache_paths(model, len(cache.layers)), cache.layers, strict=True):
            for leaf in flatten(layer):
                if hasattr(leaf, "bits"):
                    report = _held_rows(f"{path}.cache", calls[path], leaf, observer)
                    restore.append(tap(leaf, report, "update_and_fetch"))
                    calls[path] += 1
        yield
    finally:
        for undo in reversed(restore):
            undo()


def _held_rows(path: str, call: int, leaf: Any, observer: Callable[[Seen], None]) -> Callable[[tuple, dict, Any], None]:
    def seen(args: tuple, kwargs: dict, out: Any) -> None:
        for name, given, packed in zip(("keys", "values"), args, out, strict=True):
            rows = [a[..., -given.shape[-2] :, :] for a in packed]
            held = mx.dequantize(*rows, group_size=leaf.group_size, bits=leaf.bits)
            step = mx.repeat(mx.abs(rows[1]), leaf.group_size, axis=-1)
            observer(Seen(f"{path}.{name}", call, "cache", held, given, step=step))

    return seen
