"""Where a block first computes other bits than the same tokens one by one.

From one identical state the block runs once as it is and once token by token; every module's output is compared
bitwise, row by row, in the order in which the modules finish. Only the outputs of the one block are held, never those
of a whole text. The first module that differs is where the difference is made; what follows carries it on.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from mtplab.diagnose import watch
from mtplab.errors import RequestError
from mtplab.models.cache import Cache
from mtplab.models.target import Target

PREFILL_STEP = 2048


@dataclass(frozen=True, slots=True)
class ModuleDiff:
    """One module's output over the block: at once against one by one."""

    path: str
    kind: str
    equal: bool
    ulp_max: int
    abs_max: float
    rows: tuple[int, ...] = ()  # the rows of the block that differ
    differ: int = 0
    elements: int = 0
    made: bool = False  # differs although its input had the same bits
    relative: float = 0.0  # |difference| / |output| of the row that is furthest off
    choice: str | None = None  # a router's ids that it takes or gives are in another "order", or another "set"
    given: float = 0.0  # `relative` of its input; 0 where that had the same bits
    beyond: float | None = None  # of a quantized cache: `relative` less the steps of `watch.STEPS`


@dataclass(frozen=True, slots=True)
class Location:
    """`modules` in the order in which they finish. `first_module` is None where every module gave the same bits.

    A module that differs because its input does is not the first: then the difference was made by what the module
    around it computes itself (the attention between its projections, a residual), and that one is named.
    """

    first_module: str | None
    modules: tuple[ModuleDiff, ...]
    width: int
    prefix: int
    logits: ModuleDiff | None = None

    def by_layer(self) -> list[dict[str, Any]]:
        """The growth of the difference: ulp and absolute maximum of what each decoder layer hands on."""
        return [
            {"layer": m.path, "ulp_max": m.ulp_max, "abs_max": m.abs_max}
            for m in self.modules
            if m.kind == "block" and m.path.rsplit(".", 1)[-1].isdecimal()
        ]

    def by_kind(self) -> dict[str, dict[str, Any]]:
        """kind -> modules, how many differ, the first that does, the largest ulp."""
        out: dict[str, dict[str, Any]] = {}
        for kind in watch.KINDS:
            found = [m for m in self.modules if m.kind == kind]
            if found:
                bad = [m for m in found if not m.equal]
                first = bad[0].path if bad else None
                ulp = max(m.ulp_max for m in found)
                out[kind] = {"modules": len(found), "differ": len(bad), "first": first, "ulp_max": ulp}
        return out

    def to_json(self) -> dict[str, Any]:
        return {
            "first_module": self.first_module,
            "width": self.width,
            "prefix": self.prefix,
            "by_layer": self.by_layer(),
            "by_kind": self.by_kind(),
            "logits": None if self.logits is None else asdict(self.logits),
            "modules": [asdict(m) for m in self.modules],
        }


def locate(
    target: Target,
    prefix_tokens: Sequence[int],
    block: Sequence[int],
    *,
    prompt: int | None = None,
    cache: Cache | None = None,
    chain: Cache | None = None,
) -> Location:
    """Run `block` after the prefix, at once and one by one from the same state, and compare every module.

    `prompt`: how many of the prefix are the prompt, fed in one piece as every decoder does it (default all); the rest
    goes in one at a time, so the state is one that decoding wrote. `cache`: a state to start from instead; it is
    left as it was, but for rows beyond its length. `chain`: a state of the same rows that blocks wrote, which the block
    starts from and the rows do not: a sliding window then holds them in another order, which may show in one row
    alone. Raises RequestError for a block without two tokens, or one without `chain`.
    """
    if len(block) < (2 if chain is None else 1):
        raise RequestError(f"a block of {len(block)} token(s) has no width to compare; give at least two tokens")
    cache = filled(target, prefix_tokens, prompt) if cache is None else cache
    before, tokens = cache.length, mx.array(list(block))
    names = watch.kinds(target.model, cache.layers)
    whole = _Whole()
    start = cache if chain is None else chain
    with (
        watch.watching(target.model, whole.add, names),
        watch.watching_cache(target.model, start, whole.add),
        start.attempt(len(block)),
    ):
        mx.eval(target.forward(tokens, start).logits, whole.outputs())
    rows = _Rows(whole, len(block))
    with cache.attempt(len(block), singly=True):
        for r in range(len(block)):
            rows.start(r)
            with watch.watching(target.model, rows.add, names), watch.watching_cache(target.model, cache, rows.add):
                mx.eval(target.forward(tokens[r : r + 1], cache).logits, cache.arrays())
    modules = rows.result()
    first = next((m for m in modules if not m.equal), None)
    name = None if first is None else first.path if first.made else around(first.path, names)
    return Location(name, tuple(modules), len(block), before, modules[-1] if modules else None)


def around(path: str, names: Collection[str]) -> str:
    """The innermost named module that holds this one; the module itself where there is none."""
    parts = path.split(".")
    outer = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
    return next((p for p in outer if p in names), path)


def filled(target: Target, tokens: Sequence[int], prompt: int | None = None, *, step: int = PREFILL_STEP) -> Cache:
    """A fresh cache with the tokens in it: the prompt in chunks of `step` with its last token alone, as every decoder
    feeds it, the rest one by one."""
    cache, ids = target.new_cache(), mx.array(list(tokens), dtype=mx.int32)
    prompt = len(tokens) if prompt is None else prompt
    bounds = [*range(0, max(0, prompt - 1), step), *range(max(0, prompt - 1), len(tokens) + 1)]
    for begin, end in itertools.pairwise(bounds):
        target.forward(ids[begin:end], cache)
        mx.eval(cache.arrays())
    return cache


class _Whole:
    """The outputs of the block as one piece, by module and call, in order."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str, int], watch.Seen] = {}

    def add(self, seen: watch.Seen) -> None:
        self.seen[seen.path, seen.kind, seen.call] = seen

    def outputs(self) -> list[mx.array]:
        return [a for s in self.seen.values() for a in (s.output, s.input, s.ids, s.step) if a is not None]


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a module's output against the block's."""

    number: int
    out: watch.Difference
    given: watch.Difference | None  # its input; None where that is not known, or does not matter
    beyond: float | None = None


class _Rows:
    """Compares the outputs of single rows with the block's, as they come."""

    def __init__(self, whole: _Whole, width: int):
        self.whole, self.width, self.row = whole, width, 0
        self.found: dict[tuple[str, str], list[_Row]] = {}
        self.choice: dict[tuple[str, str], str] = {}

    def start(self, row: int) -> None:
        self.row = row

    def add(self, seen: watch.Seen) -> None:
        block = self.whole.seen.get((seen.path, seen.kind, seen.call))
        found = None if block is None else self._compare(block.output, seen.output)
        if found is None:
            return  # only one of the two ways uses this module, or it does not work by rows
        # The input matters only where the output differs.
        given = None if found.equal or seen.input is None else self._compare(block.input, seen.input)
        beyond = None if seen.step is None else self._beyond(block, seen)
        self.found.setdefault((seen.path, seen.kind), []).append(_Row(self.row, found, given, beyond))
        ids = None if found.equal or seen.ids is None else self._compare(block.ids, seen.ids)
        if ids is not None and not ids.equal and self.choice.get((seen.path, seen.kind)) != "set":
            self.choice[seen.path, seen.kind] = "set" if ids.relative else "order"

    def _compare(self, block: mx.array | None, one: mx.array) -> watch.Difference | None:
        row = self._row(block, one)
        return None if row is None else watch.difference(row, one)

    def _beyond(self, block: watch.Seen, one: watch.Seen) -> float:
        step = mx.maximum(self._row(block.step, one.step), one.step).astype(mx.float32)
        return watch.share(self._row(block.output, one.output), one.output, spare=watch.STEPS * step).item()

    def _row(self, block: mx.array | None, one: mx.array) -> mx.array | None:
        """The row of the block that `one` is; None where the shapes do not tell."""
        if block is not None and self.width == 1 and block.shape == one.shape:
            return block
        axis = None if block is None else row_axis(block.shape, one.shape, self.width)
        return None if axis is None else mx.take(block, mx.array([self.row]), axis=axis)

    def result(self) -> list[ModuleDiff]:
        keys = dict.fromkeys(k[:2] for k in self.whole.seen)
        return [_merge(*k, self.found[k], self.choice.get(k)) for k in keys if k in self.found]


def row_axis(block: Sequence[int], one: Sequence[int], width: int) -> int | None:
    """The axis along which a block of `width` rows was cut; None where the shapes do not tell."""
    if len(block) != len(one):
        return None
    differ = [i for i, (a, b) in enumerate(zip(block, one, strict=True)) if a != b]
    return differ[0] if len(differ) == 1 and block[differ[0]] == width and one[differ[0]] == 1 else None


def _merge(path: str, kind: str, rows: Sequence[_Row], choice: str | None) -> ModuleDiff:
    found = [r.out for r in rows]
    bad = [r for r in rows if not r.out.equal]
    beyond = [r.beyond for r in rows if r.beyond is not None]
    return ModuleDiff(
        path,
        kind,
        not bad,
        max(d.ulp_max for d in found),
        max(d.abs_max for d in found),
        tuple(dict.fromkeys(r.number for r in bad)),
        sum(d.differ for d in found),
        sum(d.elements for d in found),
        bool(bad) and (bad[0].given is None or bad[0].given.equal),
        max(d.relative for d in found),
        choice,
        max((r.given.relative for r in bad if r.given is not None), default=0.0),
        max(beyond, default=None),
    )
