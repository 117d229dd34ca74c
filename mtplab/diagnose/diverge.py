"""Arms beside the baseline on prompts: where each leaves it, and a closer second look at why.

First run: all arms in lockstep with one baseline; every row and every state is compared. Second run, only where
something differed: the arm again beside its shadow (`shadow.py`), up to the place; there the noise is measured, the
block is taken apart module by module (`locate`), and a set of modules is looked for that explains it (`intervene`).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from mtplab.backend.clock import Clock, MonotonicClock
from mtplab.decode.drafters.mtp import MTPDrafter
from mtplab.decode.policy import AdaptiveDepth
from mtplab.decode.selection import Draws
from mtplab.decode.settings import Settings
from mtplab.decode.speculative import speculative
from mtplab.decode.stopping import Stops
from mtplab.decode.verify import units
from mtplab.diagnose import sensitivity, state
from mtplab.diagnose.candidates import Around, Candidate, Parts, Tamper, begin, make_drafter, make_policy, nothing
from mtplab.diagnose.intervene import Case, Explained, role
from mtplab.diagnose.lane import Lane
from mtplab.diagnose.reference import Reference
from mtplab.diagnose.seen import Seen
from mtplab.diagnose.shadow import Shadow
from mtplab.diagnose.verdict import PRODUCTS, SUSPECT, Evidence, Moved, Verdict, covered, judge, module_at_fault
from mtplab.errors import RequestError
from mtplab.models.cache import Cache
from mtplab.models.heads import Head
from mtplab.models.target import Target
from mtplab.records.types import Verify

AGAIN = "baseline"  # the baseline a second time: is it reproducible?
CLOSER = 2  # prompts of an arm that leave, and as many whose state is far off, get a second look at once
MOST = 8  # and so many at most, where what was measured on those does not cover the others
EXPLAINED = 8  # divergences that the modules are sought for
Locate = Callable[..., Any]  # see `diagnose.locate.locate`


@dataclass(frozen=True, slots=True)
class Text:
    """One prompt."""

    id: str
    tokens: tuple[int, ...]


@dataclass(slots=True)
class OnPrompt:
    """Everything the first run saw on one prompt."""

    text: Text
    tokens: list[int]  # the baseline's
    cut: str | None
    margins: list[float]
    lanes: dict[str, Seen]


@dataclass(slots=True)
class Diagnosis:
    """The result, before it is put into words."""

    prompts: list[OnPrompt]
    arms: tuple[str, ...]  # without the second baseline
    verdicts: dict[str, dict[str, Verdict]]  # arm -> prompt id -> verdict
    evidence: dict[str, list[Evidence]] = field(default_factory=dict)
    reproducible: bool = True
    simulated: str | None = None
    paths: list[str] = field(default_factory=list)  # of the layers
    dtype: str = "float32"  # of the logits
    explained: Explained | None = None
    has_window: bool = False

    def sorted_margins(self) -> list[float]:
        """The baseline's top-2 gaps at every position, in order."""
        if self._sorted is None:
            self._sorted = sorted(m for p in self.prompts for m in p.margins)
        return self._sorted

    _sorted: list[float] | None = None


class Diagnoser:
    """One model and its options; `run` takes the prompts."""

    def __init__(
        self,
        target: Target,
        *,
        settings: Settings,
        stops: Callable[[], Stops] | None = None,
        head: Head | None = None,
        clock: Clock | None = None,
        tamper: Tamper | None = None,
        around: Around = nothing,
        say: Callable[[str], None] = lambda text: None,
        locate: Locate | None = None,
        explain: Callable[..., Any] | None = None,
    ):
        """`tamper` and `around` inject faults (around: a context that every pass of an arm runs in)."""
        self._logs: dict[tuple[str, int], Candidate] = {}
        if not settings.greedy:
            raise RequestError("diverge compares greedy decoding; leave --temp at 0")
        self.target, self.head, self.settings = target, head, settings
        self.stops = stops or (lambda: Stops(settings))
        self.clock, self.tamper, self.around, self.say = clock or MonotonicClock(), tamper, around, say
        self.locate, self.explain = locate, explain
        self.paths, self.dtype = state.layer_paths(target), "float32"

    def run(self, texts: Sequence[Text], candidates: Sequence[Candidate], simulated: str | None = None) -> Diagnosis:
        """Both runs over all prompts."""
        check_texts(texts)
        self._logs.clear()
        found = [self._compare(i, text, candidates) for i, text in enumerate(texts)]
        again = [p.lanes[AGAIN] for p in found]
        steady = not any(seen.rows_differ or seen.leaves or seen.state_rounded for seen in again)
        window = any("window" in kinds for kinds in self.target.cache_kinds)
        out = Diagnosis(
            found, tuple(c.name for c in candidates), {}, reproducible=steady, simulated=simulated, paths=self.paths,
            dtype=self.dtype, has_window=window,
        )  # fmt: skip
        for candidate in candidates:
            closer = self._closer(candidate, out)
            out.evidence[candidate.name] = list(closer.values())
            out.verdicts[candidate.name] = {
                p.text.id: judge(p.lanes[candidate.name], closer.get(p.text.id), reproducible=steady, paths=self.paths)
                for p in found
            }
            self._borrow(candidate.name, out)
        self._intervene(out)
        return out

    def _reference(self, text: Text, request: int) -> Reference:
        return Reference(
            self.target, text.tokens, settings=self.settings, stops=self.stops(), clock=self.clock, head=self.head,
            request=request,
        )  # fmt: skip

    def _lane(self, candidate: Candidate, reference: Reference, request: int, **options: Any) -> Lane:
        if candidate.name == "adaptive" and candidate.depths is None:
            raise RequestError("adaptive must be replayed from its log")
        drafter = make_drafter(candidate, self.head, self.settings, reference, request)
        parts = Parts(
            self.target, self.target.new_cache(), drafter, make_policy(candidate), self.settings, self.stops()
        )
        if self.tamper is not None and candidate.name != AGAIN:
            parts = self.tamper(parts)
        lane = Lane(candidate.name, reference, parts, lazy=candidate.name == AGAIN, **options)
        lane.stream = begin(candidate, parts, reference.prompt, clock=self.clock, request=request)
        return lane

    def _step(self, lane: Lane) -> None:
        if lane.name == AGAIN:
            lane.step()
            return
        with self.around():
            lane.step()

    # -- the first run ---------------------------------------------------------------------------------------------

    def _compare(self, request: int, text: Text, candidates: Sequence[Candidate]) -> OnPrompt:
        reference = self._reference(text, request)
        fixed = [self.logged(c, text, request) for c in candidates]
        lanes = [self._lane(c, reference, request) for c in [Candidate(AGAIN), *fixed]]
        # The arm that is furthest behind goes on: the baseline keeps few rows.
        while waiting := [lane for lane in lanes if not lane.done]:
            self._step(min(waiting, key=lambda lane: lane.next))
        reference.finish()
        self.dtype = str(reference.rows[max(reference.rows)].logits.dtype).removeprefix("mlx.core.")
        self.say(f"{text.id}: {len(reference.tokens)} tokens")
        return OnPrompt(text, reference.tokens, reference.cut, reference.margins, {x.name: x.seen for x in lanes})

    def logged(self, candidate: Candidate, text: Text, request: int) -> Candidate:
        """The adaptive arm as a replay of the depths it chose in a run of its own; other arms as they are."""
        if candidate.name != "adaptive" or candidate.depths is not None:
            return candidate
        if (candidate.name, request) in self._logs:
            return self._logs[candidate.name, request]
        draws = Draws(self.settings.seed, request)
        drafter = MTPDrafter(self.head, self.settings, draws, history=candidate.history, prime=candidate.prime)
        records = speculative(
            self.target, self.target.new_cache(), text.tokens, drafter=drafter, policy=AdaptiveDepth(),
            settings=self.settings, stops=self.stops(), clock=self.clock, request=request,
        )  # fmt: skip
        depths = tuple(r.depth for r in records if isinstance(r, Verify))
        made = Candidate(candidate.name, candidate.drafter, None, depths, candidate.history, candidate.prime)
        self._logs[candidate.name, request] = made  # the policy reads a clock: another run may choose other depths
        return made

    # -- the second run --------------------------------------------------------------------------------------------

    def _closer(self, candidate: Candidate, out: Diagnosis) -> dict[str, Evidence]:
        """Evidence for the prompts where a second look can tell something, at most MOST of an arm. None where the
        baseline does not repeat itself: there a difference means nothing."""
        if not out.reproducible:
            return {}
        lanes = {n: p.lanes[candidate.name] for n, p in enumerate(out.prompts)}
        ranked = sorted((n for n in lanes if place(lanes[n]) is not None), key=lambda n: -lanes[n].off)
        far = [n for n in ranked if lanes[n].off > SUSPECT][:CLOSER]
        # Where bits differ but nothing left and nothing is far off, one look per arm is enough.
        chosen = [*dict.fromkeys([n for n in ranked if lanes[n].leaves][:CLOSER] + far)] or ranked[:1]
        found: dict[int, Evidence] = {}
        while chosen and len(found) < MOST:
            number = chosen.pop(0)
            prompt, until = out.prompts[number], place(lanes[number])
            self.say(f"{candidate.name}: a closer look at {prompt.text.id}, token {until}")
            found[number] = self._look(candidate, prompt, number, until)
            sound = [e for e in found.values() if not e.seen.faults]
            rest = [n for n in ranked if n not in found and not covered(lanes[n], sound)]
            chosen = chosen or rest[:1]
        return {out.prompts[n].text.id: e for n, e in found.items()}

    def _look(self, candidate: Candidate, prompt: OnPrompt, request: int, until: int) -> Evidence:
        reference = self._reference(prompt.text, request)
        shadow = Shadow(self.target, prompt.text.tokens, self.settings)
        lane = self._lane(self.logged(candidate, prompt.text, request), reference, request, shadow=shadow)
        found = Evidence(prompt.text.id, None, lane.seen, until=until)
        while not lane.done and lane.next <= until:
            self._step(lane)
            if lane.left_at is not None and not found.replay_noise:
                found.replay_noise = self._replays(reference, lane.left_at)  # while that state is still there
            if not found.located and (lane.seen.rows_differ or lane.seen.state_rounded):
                # Until this pass both had the same bits, so this very block makes the difference.
                self._take_apart(found, reference, lane.wide)
                if not found.modules:  # or the order in which the blocks before it left the rows of a window
                    self._take_apart(found, reference, lane.block, chain=shadow.before())
        found.leave = lane.seen.leaves[0] if lane.seen.leaves else None
        if not found.replay_noise and lane.wide is not None and lane.wide.valid:
            found.replay_noise = self._replays(reference, lane.wide)
        if module_at_fault(found.modules) is None:
            self._take_apart(found, reference, lane.wide)
        return found

    def _replays(self, reference: Reference, block: Any) -> dict[int, float]:
        """Width -> noise of that many rows of the block from the one-token state."""
        measured = {w: self._replay(reference, block, w) for w in range(1, len(block.tokens) + 1)}
        return {w: noise for w, noise in measured.items() if noise is not None}

    def _replay(self, reference: Reference, block: Any, width: int) -> float | None:
        """The block's first `width` rows from the one-token state: their largest distance from the baseline's rows.
        None, not measured: the baseline has gone on and that state is gone."""
        cache = reference.copy_at(len(reference.prompt) + block.position - 1)
        if cache is None:
            return None
        valid = min(width, block.valid)
        got = self.target.forward(mx.array(block.tokens[:width]), cache).logits[:valid].astype(mx.float32)
        rows = mx.stack([reference.rows[block.position + j].logits for j in range(valid)]).astype(mx.float32)
        return mx.abs(got - rows).max().item()

    def _take_apart(self, found: Evidence, reference: Reference, block: Any, *, chain: Cache | None = None) -> None:
        """Every module of the block at once (from the state `chain`, if given) against row by row from the baseline's.
        What the first block shows stays, but for a fault."""
        if self.locate is None or block is None or (chain is None and len(block.tokens) < 2):
            return
        cache = reference.copy_at(len(reference.prompt) + block.position - 1)
        if cache is None or (chain is not None and chain.length != cache.length):
            return
        text = reference.context(block.position - 1)
        location = self.locate(self.target, text, block.tokens, cache=cache, chain=chain)
        wide = reference.rows[max(reference.rows)].logits.dtype == mx.float32
        modules = [
            Moved(m.path, m.kind, m.relative, m.ulp_max, m.made, wide, m.choice, m.given, m.beyond)
            for m in location.modules
            if not m.equal
        ]
        modules = self._measured(modules, block.tokens, cache)
        found.located = True
        if not found.modules or module_at_fault(modules) is not None:
            found.modules, found.first_module = modules, location.first_module
            found.by_layer, found.by_kind = location.by_layer(), location.by_kind()

    def _measured(self, modules: list[Moved], block: Sequence[int], cache: Cache) -> list[Moved]:
        """What rounding does to these very rows, before anything is held against a module."""
        chosen = next((m for m in modules if m.choice == "set"), None)  # what comes after it chooses for other rows
        far = any(m.by_rows and m.relative > SUSPECT for m in modules)
        if module_at_fault(modules) is None and not far and chosen is None:
            return modules
        small = [m for m in modules if m.choice is None and m.relative <= SUSPECT]
        own = [m.relative for m in small if m.own and m.kind in PRODUCTS]
        size = sensitivity.rounding(own, getattr(mx, self.dtype))
        reach = sensitivity.reach(self.target, block, cache, size)
        modules = [replace(m, reach=reach.get((m.path, m.kind), m.reach)) for m in modules]
        if chosen is not None:
            wide = sensitivity.WIDER * max(size, chosen.given)
            if (chosen.path, chosen.kind) not in sensitivity.ties(self.target, block, cache, wide):
                modules = [replace(m, choice="wrong") if m.choice == "set" else m for m in modules]
        return modules

    def _intervene(self, out: Diagnosis) -> None:
        """The smallest set of modules that, run row by row, makes the numeric divergences go away."""
        if self.explain is None:
            return
        by_arm = [cases(out, arm) for arm in out.arms]
        # Some of every arm: a search over all of them would take longer than everything before it.
        chosen = [c for turn in itertools.zip_longest(*by_arm) for c in turn if c is not None][:EXPLAINED]
        if not chosen:
            return
        differ = [m for es in out.evidence.values() for e in es for m in e.modules]
        # The same module of all layers: what one block showed in one layer, another may show in the next.
        roles = {role(m.culprit) for m in differ if m.kind not in ("block", "other", "cache")}
        some = [u for u in units(self.target) if role(u.path) in roles]
        self.say(f"which modules explain {len(chosen)} divergences?")
        step = self.settings.prefill_step
        out.explained = self.explain(self.target, chosen, some or None, step=step)
        if some and out.explained.most < out.explained.total:
            out.explained = self.explain(self.target, chosen, None, step=step)

    def _borrow(self, arm: str, out: Diagnosis) -> None:
        """Prompts without a second look share what was measured on those with one, if it covers all their gaps and
        states."""
        verdicts = out.verdicts[arm]
        looked = {e.prompt for e in out.evidence[arm]}
        evidence = [e for e in out.evidence[arm] if verdicts[e.prompt].verdict in ("numeric", "equal")]
        if not evidence:
            return
        for prompt in out.prompts:
            seen, verdict = prompt.lanes[arm], verdicts[prompt.text.id]
            if verdict.verdict != "unknown" or prompt.text.id in looked or not covered(seen, evidence):
                continue
            if seen.leaves:
                noise = max(e.largest_noise for e in evidence)
                reason = f"gap {seen.leaves[0].gap:.3g} <= 2 x noise {noise:.3g}, as measured on another prompt"
                verdicts[prompt.text.id] = Verdict("numeric", reason, position=seen.leaves[0].position)
            else:
                verdicts[prompt.text.id] = Verdict("equal", f"equal through {seen.compared} tokens")


def cases(out: Diagnosis, arm: str) -> list[Case]:
    """The numeric divergences of an arm, each as its passes up to the one that leaves."""
    found = []
    for prompt in out.prompts:
        if out.verdicts[arm][prompt.text.id].verdict != "numeric":
            continue
        seen = prompt.lanes[arm]
        ends = list(itertools.accumulate((kept for _, kept in seen.passes), initial=1))
        for leave in seen.leaves:
            number = bisect.bisect_right(ends, leave.position)
            if leave.position > 0 and number <= len(seen.passes):
                passes = tuple(seen.passes[:number])
                found.append(Case(prompt.text.tokens, tuple(prompt.tokens), passes, leave.position))
    return found


def place(seen: Seen) -> int | None:
    """Up to which output position a second look goes; None where there is nothing to look at. A near-tie explains
    neither a later and larger gap nor a state that is far off: the look goes on to those."""
    places = [seen.worst_at[0]] if seen.off > SUSPECT else []
    if seen.leaves:
        places += [seen.leaves[0].position, max(seen.leaves, key=lambda x: x.gap).position]
    if places:
        return max(places)
    first = [seen.first_rounded[0]] if seen.first_rounded is not None else []
    first += [seen.first_differs] if seen.first_differs is not None else []
    return min(first) + 8 if first else None


def check_texts(texts: Sequence[Text]) -> None:
    for text in texts:
        if len(text.tokens) < 2:
            count = len(text.tokens)
            raise RequestError(
                f"prompt {text.id!r} has {count} token{'' if count == 1 else 's'}; diverge needs two or more, "
                "since the comparison begins from a state that a prefill has left"
            )
