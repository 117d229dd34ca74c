"""The verdict on one arm: equal, numeric, logic, length or unknown. A pure function of the evidence.

Numeric needs all of it: the baseline repeats itself; the arm does what the same blocks do without its loop; the state
is clean; no module moves by more than rounding can; and the gap is at most twice the noise, which was measured on the
same rows at the same widths. A small gap alone proves nothing: a fault may well strike at a near-tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mtplab.diagnose.lane import BESIDE
from mtplab.diagnose.seen import Fault, Leave, Seen

VERDICTS = ("logic", "unknown", "numeric", "length", "equal")  # the gravest first
SUSPECT = 2.0**-5  # of a state's row, or of a module's output: what rounding alone is not expected to move
JUMP = 8.0  # a module at fault is so many times further off than everything before it
# The core of an attention or a recurrent mixer in float32 sums a few hundred rows: what is exact before it cannot come
# out further off than this, not even with 10-bit products.
CORE_SUSPECT, CORE_JUMP = 2.0**-8, 256.0
REPEATS = 2.0  # the second run of the same passes: further off the first time means that the arm does not repeat itself
PRODUCTS = ("linear", "quantized linear", "router", "unembedding")
# What works on each row alone hands its input's difference on: a module that makes more of it is at fault.
BY_ROWS = 4.0
WINDOW = 2.0  # gap <= WINDOW x noise


@dataclass(frozen=True, slots=True)
class Moved:
    """A module whose output for a block differs from that for the same rows one by one, from one identical state."""

    path: str
    kind: str
    relative: float
    ulps: int = 0
    made: bool = True  # its own input had the same bits
    wide: bool = True  # computed in float32
    choice: str | None = None  # see `locate.ModuleDiff`, these three; "wrong": another set, and no near-tie
    given: float = 0.0
    beyond: float | None = None
    reach: tuple[float, float] = (0.0, 0.0)  # of rounding, in output and input, where it was measured: `sensitivity`

    @property
    def by_rows(self) -> bool:
        return self.kind in PRODUCTS or self.kind == "norm"

    @property
    def own(self) -> bool:
        """Whether the module made most of the difference itself."""
        return self.made or self.relative > JUMP * self.given

    @property
    def culprit(self) -> str:
        """The module itself, or the one around it where the difference comes from between its parts (an attention)."""
        own = self.own and not (self.choice == "wrong" and self.kind == "experts")  # they are told what was chosen
        return self.path if own or "." not in self.path else self.path.rsplit(".", 1)[0]


@dataclass(slots=True)
class Evidence:
    """What a second, closer run of one arm on one prompt showed, up to where the arm left or its state differed."""

    prompt: str
    leave: Leave | None
    seen: Seen
    replay_noise: dict[int, float] = field(default_factory=dict)  # width -> noise from the one-token state
    modules: list[Moved] = field(default_factory=list)
    located: bool = False
    by_layer: list[dict[str, Any]] = field(default_factory=list)  # growth of the difference
    by_kind: dict[str, dict[str, Any]] = field(default_factory=dict)
    first_module: str | None = None
    until: int = 0  # the output position that the look was to reach

    @property
    def noise(self) -> float | None:
        """Largest |difference of logits| between the same rows in blocks and one by one: from the one-token state, and
        along the chain of blocks up to here."""
        values = [*self.replay_noise.values()]
        if self.leave is not None and self.leave.noise is not None:
            values.append(self.leave.noise)
        elif self.seen.shadow_rows:
            values.append(self.seen.noise)
        return max(values, default=None)

    @property
    def largest_noise(self) -> float:
        """The noise at its largest, anywhere in this run."""
        return max(self.noise or 0.0, self.seen.noise)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason` is one sentence; `fault` names what is wrong where the verdict is logic."""

    verdict: str
    reason: str
    layer: int | None = None
    module: str | None = None
    verify: int | None = None
    position: int | None = None
    kind: str | None = None


def gravest(verdicts: Sequence[str]) -> str:
    return min(verdicts, key=VERDICTS.index, default="equal")


def module_at_fault(modules: Sequence[Moved]) -> Moved | None:
    """The first module that is off by more than rounding, and suddenly so: see SUSPECT and JUMP.

    Rounding decides near-ties of a router, too (where it cannot, the choice is "wrong"). Where the same experts come in
    another order, their outputs cannot be compared, but what is summed up from them can; where other experts were
    chosen, nothing after that is small.
    """
    before, shuffled = 0.0, set()
    for m in modules:
        if m.choice == "wrong":
            return m
        if m.choice == "set":
            before = max(before, m.relative, 1.0)
        if m.choice == "order":
            shuffled.add(m.path.rsplit(".", 1)[0] + "." if m.kind != "router" else m.path)
        if m.choice is not None or any(m.path.startswith(p) for p in shuffled):
            continue
        own, (out, given) = m.relative if m.beyond is None else m.beyond, m.reach
        core, bound = (m.relative, out) if m.kind in ("attention", "recurrent mixer") else (m.given, given)
        if own > max(SUSPECT, JUMP * before, JUMP * out):
            return m
        if m.by_rows and out and own > max(SUSPECT, BY_ROWS * m.given, BY_ROWS * out):
            return m
        if m.wide and core > max(CORE_SUSPECT, CORE_JUMP * before, JUMP * bound):  # what comes from between modules
            return m
        before = max(before, m.given, m.relative)
    return None


def judge(seen: Seen, evidence: Evidence | None, *, reproducible: bool, paths: Sequence[str] = ()) -> Verdict:
    """One arm on one prompt. `paths`: the layers' names."""
    faults = seen.faults + ([] if evidence is None else evidence.seen.faults)
    counted = [f for f in faults if f.counted]
    if counted or (faults and reproducible):
        return _logic(_first(faults if reproducible else counted), paths)
    if not reproducible and (seen.leaves or seen.rows_differ):
        return Verdict("unknown", "the baseline does not repeat itself, so no difference from it can be explained")
    if evidence is not None and (bad := module_at_fault(evidence.modules)) is not None:
        position = evidence.leave.position if evidence.leave else None
        return Verdict("logic", _blame(bad), module=bad.culprit, position=position, kind="block")
    if evidence is not None and seen.off > max(SUSPECT, REPEATS * evidence.seen.off):
        reason = f"the state was off by {seen.off:.2g} of itself, and in a closer look by {evidence.seen.off:.2g} only"
        return Verdict("unknown", reason, verify=seen.worst_at[1], position=seen.worst_at[0], kind="state")
    if seen.leaves:
        return _leaves(seen, evidence)
    if evidence is None and seen.off > SUSPECT:
        reason = f"no token differs, but the state was off by {seen.off:.2g} of itself, and no closer look was taken"
        return Verdict("unknown", reason, verify=seen.worst_at[1], position=seen.worst_at[0], kind="state")
    if seen.end in ("short", "long"):
        return Verdict("length", f"equal through {seen.compared} tokens, then the arm's text is too {seen.end}")
    return Verdict("equal", f"equal through {seen.compared} tokens")


def _blame(bad: Moved) -> str:
    rows = "the same rows one by one"
    if bad.choice == "wrong":
        return f"{bad.culprit} makes another choice for a block's rows than for {rows}, and not by a tie"
    far = f"{bad.culprit} gives a block rows that are {bad.relative:.2g} of themselves away from {rows}"
    moves = f"rounding moves them by {max(bad.reach):.1g}" if any(bad.reach) else "no rounding is that large"
    return f"{far}, from one identical state: {moves}"


def _first(faults: Sequence[Fault]) -> Fault:
    # What is wrong in a layer's state is nearer to the cause than what the loop then does with it.
    order = ("state", "head", "rows", "prefill", "fed", "selection", "acceptance", "logits")
    earliest = min(f.verify for f in faults)
    return min((f for f in faults if f.verify <= earliest + 1), key=lambda f: order.index(f.kind))


def _logic(fault: Fault, paths: Sequence[str]) -> Verdict:
    name = None
    if fault.layer is not None and fault.kind == "state":
        name = paths[fault.layer] if fault.layer < len(paths) else f"layers.{fault.layer}"
    when = "after the prefill" if fault.verify < 0 else f"at verify {fault.verify}"
    where = f"{name}: " if name else ""
    reason, layer = f"{where}{fault.text}, first {when}", fault.layer if name else None
    return Verdict("logic", reason, layer, None, fault.verify, fault.position, fault.kind)


def _leaves(seen: Seen, evidence: Evidence | None) -> Verdict:
    leave = seen.leaves[0]
    if evidence is None or evidence.leave is None or evidence.noise is None:
        return Verdict("unknown", "the noise was not measured for this divergence", position=leave.position)
    over = _beyond_noise(seen, evidence)
    if over is None:
        shadow = evidence.seen
        same = shadow.shadow_row_diff == 0 and shadow.shadow_states == shadow.shadow_states_equal
        reason = f"gap {evidence.leave.gap:.3g} <= 2 x noise {evidence.noise:.3g} on the same rows, and the state is "
        reason += "that of the same blocks" if same else "within rounding of that of the same blocks"
        return Verdict("numeric", reason, position=leave.position, module=evidence.first_module)
    (gap, position), noise = (over[0].gap, over[0].position), over[1]
    reason = f"the gap {gap:.3g} at token {position} is more than twice the noise {noise:.3g}, but nothing wrong was "
    return Verdict("unknown", reason + "found in the state", position=leave.position)


def _beyond_noise(seen: Seen, evidence: Evidence) -> tuple[Leave, float] | None:
    """The first divergence whose gap is more than twice the noise, and that noise: its own block's or what was measured
    from the one-token state; beyond the closer look, the largest in it."""
    known = {x.position: max(evidence.noise, x.noise or 0.0) for x in evidence.seen.leaves}
    bounds = [(x, known.get(x.position, evidence.largest_noise)) for x in seen.leaves]
    return next(((x, noise) for x, noise in bounds if x.gap > WINDOW * noise), None)


def covered(seen: Seen, evidence: Sequence[Evidence]) -> bool:
    """Whether what was measured on other prompts explains all gaps and the state of this one."""
    noise = max((e.largest_noise for e in evidence), default=0.0)
    state = max((e.seen.state_noise for e in evidence), default=0.0)
    gap = max((x.gap for x in seen.leaves), default=0.0)
    return gap <= WINDOW * noise and seen.off <= max(SUSPECT, BESIDE * state)
