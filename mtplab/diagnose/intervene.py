"""Which modules a divergence comes from: make them run row by row during the verify and see whether it goes away.

A divergence is a `Case`: the passes of an arm up to the one whose verdict differs from the baseline's token. It is
measured twice, since the cache that a verify wrote carries its rounding onward:

decode   the last pass alone, from a cache that one-token decoding wrote
chain    every pass from the prompt on, each on the cache the passes before it wrote, as the arm ran

A set of modules explains a case when with it row by row, and all else as a block, every token of the pass up to the
diverging one is the baseline's. The set is then made as small as it goes: whole roles first (`layers.*.mlp.down_proj`),
then fewer layers of a role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx

from mtplab.decode.selection import greedy
from mtplab.decode.verify import Rowwise, Unit, units
from mtplab.diagnose.locate import PREFILL_STEP, filled
from mtplab.models.cache import Cache
from mtplab.models.target import Target
from mtplab.records.types import Prefill, Verify

CASES, CHAINS = 8, 3  # that the search uses at most: from a decode-written cache, along a chain (all its passes)


@dataclass(frozen=True, slots=True)
class Case:
    """One divergence. `expected`: the baseline's output tokens, through the diverging one at least. `passes`: (drafts,
    tokens kept) of every pass of the arm, through the diverging one. `position`: the output index that differs."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]
    passes: tuple[tuple[tuple[int, ...], int], ...]
    position: int

    @classmethod
    def from_records(
        cls, prompt: Sequence[int], expected: Sequence[int], records: Iterable[Prefill | Verify]
    ) -> Case | None:
        """The first divergence of an arm's records from the baseline's tokens; None where there is none (also where it
        is in the first token, which no verify made)."""
        passes: list[tuple[tuple[int, ...], int]] = []
        for record in records:
            if isinstance(record, Prefill):
                if record.token != expected[0]:
                    return None
                continue
            passes.append((record.drafts, record.emitted))
            wanted = expected[record.position : record.position + record.emitted]
            for i, (got, want) in enumerate(zip(record.emitted_tokens, wanted, strict=False)):
                if got != want:
                    return cls(tuple(prompt), tuple(expected), tuple(passes), record.position + i)
        return None

    @property
    def start(self) -> int:
        """Output index of the first token of the diverging pass."""
        return 1 + sum(kept for _, kept in self.passes[:-1])


@dataclass(frozen=True, slots=True)
class Measured:
    """`total` cases diverge with every module as a block, `explained` of them not with the chosen ones row by row."""

    explained: int
    total: int


@dataclass(frozen=True, slots=True)
class Explained:
    """The smallest set found, empty where nothing explains anything. `total` counts the cases that the replay shows at
    all, from either kind of cache; `most` how many of them every module row by row explains."""

    by: tuple[str, ...]
    explained: int
    total: int
    most: int
    decode: Measured
    chain: Measured
    asked: int
    tried: tuple[dict[str, Any], ...] = field(default=())

    @property
    def sentence(self) -> str:
        """One line for a person."""
        if not self.total:
            return f"none of {self.asked} divergences shows when its passes are replayed"
        if not self.by:
            return f"no module explains any of {self.total}: row by row they diverge as before"
        verb = "explains" if len(self.by) == 1 else "together explain"
        return f"{', '.join(self.by)} {verb} {self.explained} of {self.total}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(
    target: Target,
    cases: Sequence[Case],
    modules: Sequence[Unit] | None = None,
    *,
    limit: int = CASES,
    step: int = PREFILL_STEP,
) -> Explained:
    """Search the smallest set among `modules` (default: everything that can run row by row; give the ones that
    `probe.variant` found to save time). The search uses at most `limit` cases from a decode-written cache and CHAINS
    along a chain; all are counted. `step`: prompt tokens per prefill pass, as the arms had it: other chunks
    leave another rounding to start from."""
    groups = grouped(units(target) if modules is None else modules)
    bench = _Bench(target, cases, step)
    found = {kind: bench.diverging(kind) for kind in ("decode", "chain")}
    everything = _all(groups)
    pairs = [("decode", i) for i in found["decode"][:limit]] + [("chain", i) for i in found["chain"][:CHAINS]]
    wanted = [(kind, i) for kind, i in pairs if bench.agrees(kind, i, everything)]
    by = _smallest(groups, lambda chosen: bench.enough(wanted, chosen)) if wanted else []
    chosen = _all(by)
    shown = {i: k for k in ("chain", "decode") for i in found[k]}
    count, most = (sum(bench.agrees(k, i, u) for i, k in shown.items()) if u else 0 for u in (chosen, everything))
    explained = {k: sum(bench.agrees(k, i, chosen) for i in which) if by else 0 for k, which in found.items()}
    decode, chain = (Measured(explained[k], len(found[k])) for k in ("decode", "chain"))
    names = tuple(name for name, _ in by)
    return Explained(names, count, len(shown), most, decode, chain, len(cases), tuple(bench.tried))


Group = tuple[str, tuple[Unit, ...]]


def grouped(chosen: Sequence[Unit]) -> list[Group]:
    """Units by role: the same module of every layer together, under its path with the number starred."""
    out: dict[str, list[Unit]] = {}
    for unit in chosen:
        out.setdefault(role(unit.path), []).append(unit)
    return [(name, tuple(members)) for name, members in out.items()]


def role(path: str) -> str:
    """model.layers.3.mlp.down_proj -> layers.*.mlp.down_proj; outside of the layers the last part."""
    return ".".join("*" if part.isdecimal() else part for part in short(path).split("."))


def short(path: str) -> str:
    """The path from `layers` on; outside of the layers the last part."""
    parts = path.split(".")
    return ".".join(parts[parts.index("layers") :] if "layers" in parts else parts[-1:])


def _all(groups: Sequence[Group]) -> list[Unit]:
    return [u for _, members in groups for u in members]


def _smallest(groups: Sequence[Group], enough: Callable[[Sequence[Unit]], bool]) -> list[Group]:
    """A set from which nothing can be taken. One role alone is tried first, the finest ones before those that hold
    others; then roles are dropped one after the other; then layers of each role."""
    fine_first = sorted(groups, key=lambda g: g[1][0].cached)
    kept = next(([g] for g in fine_first if enough(g[1])), None)
    if kept is None:
        kept = list(groups)
        for group in reversed(fine_first):  # those that hold others go first, so that what is left is fine
            fewer = [g for g in kept if g is not group]
            if fewer and enough(_all(fewer)):
                kept = fewer
    for i in range(len(kept)):
        others = [u for j, g in enumerate(kept) if j != i for u in g[1]]
        members = _fewer(kept[i][1], lambda part, others=others: enough([*others, *part]))
        kept[i] = (kept[i][0] if members == kept[i][1] else _layers(members), members)
    return kept


def _fewer(members: tuple[Unit, ...], enough: Callable[[Sequence[Unit]], bool]) -> tuple[Unit, ...]:
    """Halve while one half is enough."""
    while len(members) > 1:
        middle = len(members) // 2
        half = next((h for h in (members[:middle], members[middle:]) if enough(h)), None)
        if half is None:
            break
        members = half
    return members


def _layers(members: Sequence[Unit]) -> str:
    if len(members) == 1:
        return short(members[0].path)
    numbers = [next(p for p in u.path.split(".") if p.isdecimal()) for u in members]
    return role(members[0].path).replace("*", f"{numbers[0]}-{numbers[-1]}", 1)


class _Bench:
    """Replays cases with some modules row by row, and remembers what came out."""

    def __init__(self, target: Target, cases: Sequence[Case], step: int):
        self.target, self.cases, self.step = target, list(cases), step
        self.caches: dict[int, Cache] = {}
        self.known: dict[tuple[str, int, frozenset[str]], bool] = {}
        self.tried: list[dict[str, Any]] = []

    def diverging(self, kind: str) -> list[int]:
        """The cases that diverge with nothing row by row."""
        return [i for i in range(len(self.cases)) if not self.agrees(kind, i, [])]

    def enough(self, wanted: Sequence[tuple[str, int]], chosen: Sequence[Unit]) -> bool:
        """Whether all of the (kind, case) agree with the baseline with the chosen units row by row."""
        good = next((n for n, (kind, i) in enumerate(wanted) if not self.agrees(kind, i, chosen)), len(wanted))
        roles = list(dict.fromkeys(role(u.path) for u in chosen))
        self.tried.append({"modules": roles, "units": len(chosen), "explained": good, "of": len(wanted)})
        return good == len(wanted)

    def agrees(self, kind: str, i: int, chosen: Sequence[Unit]) -> bool:
        """Whether case i then gives the baseline's tokens."""
        key = (kind, i, frozenset(f"{u.path}:{u.method}" for u in chosen))
        if key not in self.known:
            verifier = Rowwise(self.target, chosen)
            try:
                self.known[key] = (self._decode if kind == "decode" else self._chain)(verifier, i)
            finally:
                verifier.close()
        return self.known[key]

    def _decode(self, verifier: Rowwise, i: int) -> bool:
        case = self.cases[i]
        if i not in self.caches:
            text = [*case.prompt, *case.expected[: case.start - 1]]
            self.caches[i] = filled(self.target, text, len(case.prompt), step=self.step)
        return self._last(verifier, case, self.caches[i])

    def _chain(self, verifier: Rowwise, i: int) -> bool:
        case, position = self.cases[i], 1
        cache = filled(self.target, case.prompt, step=self.step)
        for drafts, kept in case.passes[:-1]:
            block = mx.array([case.expected[position - 1], *drafts])
            with cache.attempt(len(block), singly=True) as attempt:
                mx.eval(verifier.forward(block, cache).logits, cache.arrays())
                attempt.keep(kept)
            position += kept
        return self._last(verifier, case, cache)

    def _last(self, verifier: Rowwise, case: Case, cache: Cache) -> bool:
        """Whether the diverging pass now gives the baseline's tokens, through the diverging one."""
        block = mx.array([case.expected[case.start - 1], *case.passes[-1][0]])
        with cache.attempt(len(block), singly=True):
            tokens = greedy(verifier.forward(block, cache).logits).tolist()
        rows = case.position - case.start + 1
        return tokens[:rows] == list(case.expected[case.start : case.position + 1])
