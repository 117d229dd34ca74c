"""Simulated numerics: linears whose result depends on how many rows run at once, and noise of a known size.

On the reference BLAS every row has the same bits at every width, so nothing diverges by itself. Under `simulate` it
does, for a cause that is known: chosen linears of ONE model instance compute a block of several rows in another way
than a single row, as real kernels do. With one row they are what they were.

    splitk[:PARTS]    the products of PARTS slices of the inner dimension, added in float32 (2)
    bf16acc[:SIZE]    slices of SIZE columns, the running sum rounded to bfloat16 after each (64)
    lowp              input, weight and result rounded to bfloat16
    noise:SIZE        plus SIZE x (root mean square of the row) x a number in [-1, 1) that the result's own bits decide:
                      the same row always gets the same noise, wherever it stands in a block
    jitter:SIZE       the same size, at EVERY width and another one at every call: a model that is not reproducible

A spec is `KIND[:VALUE]@PATTERN`, several with commas. The pattern is matched against the path of a module in the
checkpoint, or its end: `layers.3.mlp.*`, `lm_head` (also where the unembedding is the tied embedding), `*`.
Whatever is in force is named by `in_force`, which every record keeps.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mtplab.backend.instances import overridden, override
from mtplab.backend.keys import words
from mtplab.errors import RequestError

if TYPE_CHECKING:
    import mlx.core as mx

KINDS = {"splitk": 2, "bf16acc": 64, "lowp": None, "noise": 1e-5, "jitter": 1e-5}
WORDS = {
    "splitk": "split-K in {value} parts for blocks",
    "bf16acc": "bfloat16 accumulation every {value} columns for blocks",
    "lowp": "a bfloat16 path for blocks",
    "noise": "noise of {value:g} for blocks",
    "jitter": "irreproducible noise of {value:g} at every width",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One `KIND[:VALUE]@PATTERN`."""

    kind: str
    value: float | None
    pattern: str

    @property
    def name(self) -> str:
        """What a record says; never mistakable for a measurement of a real machine."""
        return f"simulated: {WORDS[self.kind].format(value=self.value)} at {self.pattern}"


@dataclass(frozen=True, slots=True)
class Simulation:
    """What `simulate` put in force: the spec as given, its parts, and the module paths it reached."""

    spec: str
    parts: tuple[Part, ...]
    modules: tuple[str, ...]

    @property
    def name(self) -> str:
        return "; ".join(p.name for p in self.parts)


def parse(spec: str) -> tuple[Part, ...]:
    """The parts of a spec, or a RequestError that says what is wrong with it."""
    parts = tuple(_part(text.strip()) for text in spec.split(",") if text.strip())
    if not parts:
        raise RequestError("the simulated numerics are empty; give KIND[:VALUE]@PATTERN, for example splitk@*")
    return parts


def _part(text: str) -> Part:
    match = re.fullmatch(r"(\w+)(?::([^@]+))?@(\S+)", text)
    if not match or match[1] not in KINDS:
        raise RequestError(
            f"simulated numerics {text!r} are not KIND[:VALUE]@PATTERN with KIND one of {', '.join(KINDS)}"
        )
    kind, value = match[1], KINDS[match[1]]
    if match[2] is not None:
        value = _value(kind, match[2], text)
    return Part(kind, value, match[3])


def _value(kind: str, given: str, text: str) -> float | int:
    whole = kind in ("splitk", "bf16acc")
    try:
        value = int(given) if whole else float(given)
    except ValueError:
        value = -1
    if kind == "lowp" or not (value >= 2 if whole else 0 < value <= 1):
        way = {"lowp": "lowp takes no value"}.get(kind, "a whole number from 2" if whole else "a size above 0, up to 1")
        raise RequestError(f"simulated numerics {text!r} have the value {given!r}; {way}")
    return value


def matches(path: str, pattern: str, unembedding: str | None = None) -> bool:
    """Whether a module path, or the end of it, fits; `lm_head` is also the name of a tied unembedding."""
    names = (path, "lm_head") if path == unembedding else (path,)
    return any(fnmatchcase(n, pattern) or fnmatchcase(n, f"*.{pattern}") for n in names)


def linears(model: Any) -> dict[str, tuple[Any, str]]:
    """path -> (module, method) of every linear product of the model, the tied unembedding included."""
    import mlx.nn as nn

    named = {p: m for p, m in model.named_modules() if p}
    out = {p: (m, "__call__") for p, m in named.items() if isinstance(m, nn.Linear | nn.QuantizedLinear)}
    if not any(p.split(".")[-1] == "lm_head" for p in out):
        tied = [p for p, m in named.items() if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]
        out |= {p: (named[p], "as_linear") for p in tied[:1]}
    return dict(sorted(out.items(), key=lambda item: _in_order(item[0])))


def _in_order(path: str) -> list[tuple[bool, int, str]]:
    """Layer 10 after layer 9."""
    return [(p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in path.split(".")]


@contextmanager
def simulate(target: Any, spec: str, *, seed: int = 0) -> Iterator[Simulation]:
    """Put the simulated numerics in force on one model instance (a Target or an nn.Module) for a `with` block.

    Everything is checked before anything changes, and taken away again after an exception, too. RequestError: a
    wrong spec, or a pattern that no linear of this model fits.
    """
    model = _module(target)
    parts, found = parse(spec), linears(model)
    tied = next((p for p, (_, method) in found.items() if method == "as_linear"), None)
    chosen = [(part, [p for p in found if matches(p, part.pattern, tied)]) for part in parts]
    for part, paths in chosen:
        if not paths:
            some = ", ".join([*list(found)[:2], *list(found)[-1:]])
            raise RequestError(f"simulated numerics: no linear fits {part.pattern!r}; there are {some} and others")
    restore = []
    try:
        for part, paths in chosen:
            for path in paths:
                module, method = found[path]
                restore.append(override(module, _call(part, module, path, seed), method))
        yield Simulation(spec, parts, tuple(dict.fromkeys(p for _, paths in chosen for p in paths)))
    finally:
        for undo in reversed(restore):
            undo()


def _module(target: Any) -> Any:
    import mlx.nn as nn

    return target if isinstance(target, nn.Module) else target.model


def in_force(target: Any) -> list[str]:
    """The names of all simulated numerics on this model now; empty on an honest machine."""
    names = [c.numerics for _, m in _module(target).named_modules() for c in overridden(m) if hasattr(c, "numerics")]
    return list(dict.fromkeys(names))


def marks(module: Any) -> tuple[str, ...]:
    """The simulated numerics on one module."""
    return tuple(c.numerics for c in overridden(module) if hasattr(c, "numerics"))


def _call(part: Part, module: Any, path: str, seed: int) -> Callable[..., Any]:
    compute = {"splitk": _splitk, "bf16acc": _bf16acc, "lowp": _lowp}.get(part.kind)
    calls = itertools.count(1)

    def call(inner: Callable[..., Any], x: mx.array) -> mx.array:
        if part.kind == "jitter":
            return _noisy(inner(x), part.value, words(seed, path, next(calls))[0])
        if _rows(x) == 1:
            return inner(x)
        if part.kind == "noise":
            return _noisy(inner(x), part.value, words(seed, path)[0])
        return compute(x, _weight(module), part.value, module)

    call.numerics = part.name
    return call


def _rows(x: mx.array) -> int:
    """The rows of a block [..., L, K]."""
    return x.size // x.shape[-1]


def _weight(module: Any) -> mx.array:
    """[N, K], unpacked where it is stored quantized (in the dtype of its scales, as the kernels do)."""
    import mlx.core as mx

    if "scales" not in module:
        return module.weight
    return mx.dequantize(
        module.weight, module.scales, module.get("biases"), module.group_size, module.bits, mode=module.mode
    )


def _finish(y: mx.array, x: mx.array, module: Any) -> mx.array:
    y = y.astype(x.dtype)
    return y + module.bias if "bias" in module else y


def _slices(x: mx.array, w: mx.array, size: int) -> Iterator[mx.array]:
    """The float32 products of slices of the inner dimension."""
    import mlx.core as mx

    for begin in range(0, x.shape[-1], size):
        part = slice(begin, begin + size)
        yield x[..., part].astype(mx.float32) @ w[:, part].astype(mx.float32).T


def _splitk(x: mx.array, w: mx.array, parts: int, module: Any) -> mx.array:
    return _finish(sum(_slices(x, w, max(1, -(-x.shape[-1] // parts)))), x, module)


def _bf16acc(x: mx.array, w: mx.array, size: int, module: Any) -> mx.array:
    import mlx.core as mx

    total = mx.zeros((), mx.bfloat16)
    for product in _slices(x, w, size):
        total = (total.astype(mx.float32) + product).astype(mx.bfloat16)
    return _finish(total, x, module)


def _lowp(x: mx.array, w: mx.array, _value: None, module: Any) -> mx.array:
    """bfloat16 inputs, float32 sums, a bfloat16 result. The rounded operands multiply as float32: the same numbers,
    and a CPU's bfloat16 product is very slow."""
    import mlx.core as mx

    low = (x.astype(mx.bfloat16).astype(mx.float32), w.astype(mx.bfloat16).astype(mx.float32).T)
    return _finish((low[0] @ low[1]).astype(mx.bfloat16), x, module)


def _noisy(y: mx.array, size: float, salt: int) -> mx.array:
    """y plus noise that only the bits of y, the column and the salt decide."""
    import mlx.core as mx

    wide = y.astype(mx.float32)
    columns = mx.arange(y.shape[-1], dtype=mx.uint32) * mx.array(0x9E3779B1, mx.uint32)
    bits = wide.view(mx.uint32) ^ columns ^ mx.array(salt, mx.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # Wellons' 32-bit finaliser
        bits = (bits ^ (bits >> mx.array(shift, mx.uint32))) * mx.array(factor, mx.uint32)
    unit = (bits >> mx.array(8, mx.uint32)).astype(mx.float32) * 2.0**-23 - 1.0
    scale = mx.sqrt(mx.mean(wide * wide, axis=-1, keepdims=True))
    return (wide + size * scale * unit).astype(y.dtype)
