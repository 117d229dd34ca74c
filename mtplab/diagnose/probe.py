"""Which operations of THIS model give a row the same bits whatever the number of rows, on THIS machine.

Blocks of 1 to 16 tokens run through the model; at every operation the block's result is compared, bit by bit, with
the same rows run alone. The inputs are the model's own, from random tokens, several seeds, caches of several lengths
(past the window, where there is one). Modules of the same class, dtype, quantization and shape are one operation and
one of them stands for all. The attention is compared with its linears taken out (they run row by row on both sides), so
that what it shows is its own.

A probe is evidence about the operations, never proof about a text: where it says "equal" it has looked at so many
elements and no more. Two controls go with it: every row again alone (is the machine reproducible?), and one linear
under simulated split-K, which the instrument must see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtplab.backend import numerics
from mtplab.backend.instances import override
from mtplab.backend.keys import words
from mtplab.decode.verify import (
    Rowwise,
    Serial,
    Unit,
    cache_of,
    joined,
    one_row,
    remembered_masks,
    row_count,
    units,
)
from mtplab.diagnose import watch
from mtplab.diagnose.intervene import role
from mtplab.diagnose.locate import filled
from mtplab.errors import ModelError, RequestError
from mtplab.models.cache import Cache, flatten, kind, restored
from mtplab.models.target import Target

SEEDS, WIDTHS = 3, tuple(range(1, 17))
LENGTHS = (7, 61, 200)  # rows in the cache before the block, one a seed
PAST = 9  # rows past a window


@dataclass(slots=True)
class Operation:
    """One operation of the model and what the probe saw of it. `by_width`: width -> [elements, differing, ulp, abs]."""

    kind: str
    module: str  # the class
    dtype: str
    quantization: str | None
    shape: tuple[int, ...]  # of the weight; of the output for what has none
    example: str
    count: int
    simulated: tuple[str, ...] = ()
    by_width: dict[int, list[float]] = field(default_factory=dict)
    rows: dict[int, set[int]] = field(default_factory=dict)  # width -> rows that differed

    def add(self, block: Sequence[mx.array], rows: Sequence[mx.array]) -> None:
        """One comparison: a block's outputs, [1, L, N] each, against those of its rows alone."""
        width = block[0].shape[1]
        seen = self.by_width.setdefault(width, [0, 0, 0, 0.0])
        for whole, alone in zip(block, rows, strict=True):
            d = watch.difference(whole, alone)
            seen[0] += d.elements
            seen[1] += d.differ
            seen[2:] = max(seen[2], d.ulp_max), max(seen[3], d.abs_max)
            if not d.equal:
                self.rows.setdefault(width, set()).update(_rows_that_differ(whole, alone))

    @property
    def equal_widths(self) -> list[int]:
        return [w for w, seen in self.by_width.items() if not seen[1]]

    @property
    def invariant(self) -> bool:
        return len(self.equal_widths) == len(self.by_width)

    def to_json(self) -> dict[str, Any]:
        keys = ("elements", "differ", "ulp_max", "abs_max")
        widths = [
            {"width": w, **dict(zip(keys, seen, strict=True)), "rows": sorted(self.rows.get(w, ()))}
            for w, seen in self.by_width.items()
        ]
        plain = {k: v for k, v in asdict(self).items() if k not in ("by_width", "rows")}
        return plain | {"invariant": self.invariant, "equal_widths": self.equal_widths, "widths": widths}


def _rows_that_differ(a: mx.array, b: mx.array) -> list[int]:
    unlike = a != b if not mx.issubdtype(a.dtype, mx.floating) else watch.bits(a) != watch.bits(b)
    return [r for r, differ in enumerate(mx.any(unlike, axis=-1)[0].tolist()) if differ]


@dataclass(frozen=True, slots=True)
class Probe:
    """The operations in the order in which the model calls them. `reproducible`: rows alone give the same bits
    twice (None: width 1 was not asked for)."""

    operations: tuple[Operation, ...]
    variant: tuple[Unit, ...]
    widths: tuple[int, ...]
    seeds: int
    lengths: tuple[int, ...]
    reproducible: bool | None
    control: dict[str, Any]
    numerics: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "operations": [o.to_json() for o in self.operations],
            "variant": list(dict.fromkeys(role(u.path) for u in self.variant)),
            "widths": list(self.widths),
            "seeds": self.seeds,
            "cache_lengths": list(self.lengths),
            "reproducible": self.reproducible,
            "control": self.control,
            "numerics": list(self.numerics),
        }


def probe(
    target: Target,
    *,
    widths: Sequence[int] = WIDTHS,
    seeds: int = SEEDS,
    context: int = 1 << 20,
    progress: Callable[[str], None] = lambda text: None,
) -> Probe:
    """Compare every operation at every width with width 1. `context`: positions the model has; longer caches are cut.

    RequestError: fewer than 3 seeds (one random input may agree by chance), or a width outside of 1..64.
    """
    check_seeds(seeds)
    if not widths or not all(1 <= w <= 64 for w in widths):
        raise RequestError(f"the widths {list(widths)} must lie in 1..64")
    found = units(target)
    operations, chosen = _operations(target, found)
    lengths = _lengths(target, seeds, context, max(widths))
    bench = _Bench(target, found, chosen)
    try:
        for seed, length in enumerate(lengths):
            progress(f"seed {seed + 1} of {seeds}: {length} rows in the cache, widths {min(widths)} to {max(widths)}")
            cache = filled(target, tokens(target, seed, length, "prefix"))
            for width in widths:
                bench.run(cache, tokens(target, seed, width, "block"))
    finally:
        bench.close()
    ops = tuple(operations.values())
    steady = all(o.by_width[1][1] == 0 for o in ops) if 1 in widths else None
    variant, control = _variant(target, found, operations), _control(target, found, lengths[0])
    return Probe(ops, variant, tuple(widths), seeds, tuple(lengths), steady, control, tuple(numerics.in_force(target)))


def check_seeds(seeds: int) -> None:
    """RequestError for too few random inputs."""
    if seeds < 3:
        raise RequestError(f"{seeds} seed(s) prove little: an operation may agree by chance; use 3 or more")


def tokens(target: Target, seed: int, count: int, purpose: str) -> list[int]:
    """Random ids of this model's vocabulary, the same on every machine."""
    return [words(seed, "probe", purpose, i)[0] % (target.vocab or 97) for i in range(count)]


def _lengths(target: Target, seeds: int, context: int, width: int) -> list[int]:
    """Rows in the cache, one number a seed; the last is past the longest window, where that can be reached."""
    room = max(2, min(context, 1 << 20) - width)
    windows = [
        leaf.max_size for layer in target.new_cache().layers for leaf in flatten(layer) if kind(leaf) == "window"
    ]
    lengths = [LENGTHS[i % len(LENGTHS)] + 13 * (i // len(LENGTHS)) for i in range(seeds)]
    if windows:
        lengths[-1] = max(max(windows) + PAST, lengths[-1])
    return [min(n, room) for n in lengths]


# Operations --------------------------------------------------------------------------------------------------------


def _operations(target: Target, found: Sequence[Unit]) -> tuple[dict[tuple, Operation], list[tuple[Operation, Unit]]]:
    """signature -> operation, and each operation with the unit that stands for it."""
    out: dict[tuple, Operation] = {}
    chosen = []
    for unit, key in zip(found, _signatures(target, found).values(), strict=True):
        if key in out:
            out[key].count += 1
        else:
            kind_, module, dtype, quantization, shape, marks, *_ = key
            out[key] = Operation(kind_, module, dtype, quantization, shape, unit.path, 1, marks)
            chosen.append((out[key], unit))
    return out, chosen


def _signatures(target: Target, found: Sequence[Unit]) -> dict[tuple[str, str], tuple]:
    modules, names = dict(target.model.named_modules()), watch.kinds(target.model, target.new_cache().layers)
    return {(u.path, u.method): signature(target, u, modules, names) for u in found}


def signature(target: Target, unit: Unit, modules: dict[str, nn.Module], names: dict[str, str]) -> tuple:
    """What makes two units the same operation."""
    module = modules[unit.path]
    kind_ = "unembedding" if unit.method == "as_linear" else names[unit.path]
    parameters = dict(_leaves(module.parameters()))
    weight = parameters.get("weight") if not unit.cached else None
    quantization = None
    if "scales" in module:
        quantization = f"{module.mode} {module.bits}-bit, groups of {module.group_size}"
    shape = _shape(module, weight, quantization)
    floats = [a.dtype for a in parameters.values() if mx.issubdtype(a.dtype, mx.floating)]
    dtype = str(floats[0]).split(".")[-1] if floats else "none"
    inside = tuple(sorted((n, tuple(a.shape)) for n, a in parameters.items())) if unit.cached else ()
    cache = _cache_kind(target, unit) if unit.cached else ()
    marks = () if unit.cached else numerics.marks(module)
    return (kind_, type(module).__name__, dtype, quantization, shape, marks, inside, cache)


def _shape(module: nn.Module, weight: mx.array | None, quantization: str | None) -> tuple[int, ...]:
    if weight is None:
        return ()
    if quantization is None:
        return tuple(weight.shape)
    return (*weight.shape[:-1], weight.shape[-1] * 32 // module.bits)


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, mx.array]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in items:
        if isinstance(value, mx.array):
            yield f"{prefix}{name}", value
        else:
            yield from _leaves(value, f"{prefix}{name}.")


def _cache_kind(target: Target, unit: Unit) -> tuple[str, ...]:
    numbered = {p: i for i, p in enumerate(watch.layer_paths(target.model))}
    layer = next((i for p, i in numbered.items() if unit.path.startswith(p + ".")), None)
    return tuple(target.cache_kinds[layer]) if layer is not None else ()


def _variant(target: Target, found: Sequence[Unit], operations: dict[tuple, Operation]) -> tuple[Unit, ...]:
    """Every unit whose operation cares for the width. What lies inside an attention that does needs no mention."""
    sign = _signatures(target, found)
    bad = [u for u in found if not operations[sign[u.path, u.method]].invariant]
    whole = tuple(f"{u.path}." for u in bad if u.cached)
    return tuple(u for u in bad if not whole or not u.path.startswith(whole))


# Measuring ---------------------------------------------------------------------------------------------------------


class _Bench:
    """The model with every operation's representative compared, block against rows, each time it is called."""

    def __init__(self, target: Target, found: Sequence[Unit], chosen: Sequence[tuple[Operation, Unit]]):
        self.target, self.masks = target, []
        self.quiet = True  # nothing is compared: outside of `run`, and inside rows that run alone
        self.alone = False  # inside a block whose linears run row by row
        modules = dict(target.model.named_modules())
        stands = {(u.path, u.method): op for op, u in chosen}
        whole = tuple(f"{u.path}." for _, u in chosen if u.cached)
        self.restore = []
        for unit in found:
            op = stands.get((unit.path, unit.method))
            if op is not None or (whole and unit.path.startswith(whole)):
                call = self._cached(op) if unit.cached else self._leaf(op)
                self.restore.append(override(modules[unit.path], call, unit.method))

    def close(self) -> None:
        for undo in reversed(self.restore):
            undo()
        self.restore = []

    def run(self, cache: Cache, ids: Sequence[int]) -> None:
        """One block from this state; the cache is left as it was."""
        self.masks = []
        with cache.attempt(len(ids)), remembered_masks(cache, self.masks), self._set(quiet=False):
            mx.eval(self.target.forward(mx.array(list(ids)), cache).logits)

    def _leaf(self, op: Operation | None) -> Callable[..., Any]:
        def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.quiet or (op is None and not self.alone):
                return inner(*args, **kwargs)
            rows = self._rows(inner, args, kwargs)
            if self.alone:
                return joined(rows)
            block = inner(*args, **kwargs)
            op.add(_arrays(block), _arrays(joined(rows)))
            return block

        return call

    def _cached(self, op: Operation) -> Callable[..., Any]:
        def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.quiet:
                return inner(*args, **kwargs)
            cache = cache_of(args, kwargs)
            with restored(cache), self._set(quiet=True):
                rows = self._rows(inner, args, kwargs)
            with restored(cache), self._set(alone=True):
                block = inner(*args, **kwargs)
            op.add(_arrays(block), _arrays(joined(rows)))
            return inner(*args, **kwargs)

        return call

    def _rows(self, inner: Callable[..., Any], args: tuple, kwargs: dict) -> list[Any]:
        return [one_row(inner, args, kwargs, r, self.masks) for r in range(row_count(args))]

    @contextmanager
    def _set(self, **flags: bool) -> Iterator[None]:
        before = {name: getattr(self, name) for name in flags}
        vars(self).update(flags)
        try:
            yield
        finally:
            vars(self).update(before)


def _arrays(value: Any) -> list[mx.array]:
    return [watch.held(a) for a in (value if isinstance(value, tuple) else (value,))]


def _control(target: Target, found: Sequence[Unit], length: int) -> dict[str, Any]:
    """One linear under simulated split-K: an instrument that sees no difference there sees none anywhere."""
    products = numerics.linears(target.model)
    unit = next((u for u in found if u.path in products and products[u.path][1] == u.method), None)
    if unit is None:
        return {"what": None, "width": 4, "elements": 0, "differ": 0, "seen": None}
    op = Operation("control", "", "", None, (), unit.path, 1)
    with numerics.simulate(target, f"splitk@{unit.path}"):
        bench = _Bench(target, [unit], [(op, unit)])
        try:
            bench.run(filled(target, tokens(target, 0, length, "prefix")), tokens(target, 0, 4, "control"))
        finally:
            bench.close()
    elements, differ, *_ = op.by_width[4]
    what = f"simulated: split-K in 2 parts at {unit.path}"
    return {"what": what, "width": 4, "elements": elements, "differ": differ, "seen": differ > 0}


# Exact verify ------------------------------------------------------------------------------------------------------


def rowwise(target: Target, width: int, *, context: int = 1 << 20) -> Rowwise:
    """The verifier that runs the width-variant modules of this model row by row, for blocks of up to `width` rows.

    What the probe found is checked on whole verifies, logits and what they leave in the cache, bit for bit against one
    token at a time; where it is not enough, everything runs row by row. ModelError where even that is not equal, as for
    a model that gives other bits each time.
    """
    found = probe(target, widths=range(2, max(2, width) + 1), context=context)
    roles, all_units = {role(u.path) for u in found.variant}, units(target)
    said = (
        f"{len(roles)} of {len({role(u.path) for u in all_units})} module roles row by row, widths 2..{width} checked"
    )
    for chosen in (found.variant, all_units):
        verifier = Rowwise(target, chosen, said)
        if exact(target, verifier, width, found.lengths):
            return verifier
        verifier.close()
        said = f"all module roles row by row, widths 2..{width} checked"
    raise ModelError(
        "row by row this model still differs from itself one token at a time, so no verify can be exact; "
        "mtplab probe shows whether it is reproducible"
    )


def exact(target: Target, verifier: Rowwise, width: int, lengths: Sequence[int]) -> bool:
    """Whether blocks through the verifier have the logits of one token at a time, bit for bit, on caches that earlier
    blocks wrote, some of whose rows were rejected."""
    oracle = Serial(target)
    for seed, length in enumerate(lengths):
        prefix = tokens(target, seed, length, "prefix")
        caches = [filled(target, prefix) for _ in range(2)]
        for step, rows in enumerate((width, max(2, width - 1), width)):
            ids = mx.array(tokens(target, seed, rows, f"exact {step}"))
            logits = [_step(way, cache, ids) for way, cache in zip((verifier, oracle), caches, strict=True)]
            if not watch.difference(*logits).equal:
                return False
    return True


def _step(way: Any, cache: Cache, ids: mx.array) -> mx.array:
    with cache.attempt(len(ids), singly=True) as attempt:
        logits = way.forward(ids, cache).logits
        mx.eval(logits, cache.arrays())
        attempt.keep(len(ids) - 1)
    return logits
