"""The arms that are put beside the baseline, made of the real loop, drafters and policies.

`scripted` drafts are the baseline's own text with one wrong token where the script wants a reject: every pair of
accepted counts 0..k follows one another, so full acceptance, a second reject in a row and a reject after a full block
all happen on any model, whatever its head is good for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mtplab.backend.clock import Clock
from mtplab.decode.baseline import baseline
from mtplab.decode.drafters.base import Draft
from mtplab.decode.drafters.mtp import MTPDrafter
from mtplab.decode.drafters.simple import NgramDrafter
from mtplab.decode.policy import FixedDepth, ReplayDepth
from mtplab.decode.selection import Draws
from mtplab.decode.settings import Settings
from mtplab.decode.speculative import speculative
from mtplab.decode.stopping import Stops
from mtplab.diagnose.reference import Reference
from mtplab.errors import RequestError
from mtplab.models.heads import Head
from mtplab.records.types import Prefill, Verify

DRAFTERS = ("none", "mtp", "ngram", "scripted")


@dataclass(frozen=True, slots=True)
class Candidate:
    """`depths` replays a logged policy; otherwise `depth` is fixed, and None is the baseline itself."""

    name: str
    drafter: str = "none"
    depth: int | None = None
    depths: tuple[int, ...] | None = None
    history: str = "verified"
    prime: bool = True

    def __post_init__(self) -> None:
        if self.drafter not in DRAFTERS:
            raise RequestError(f"drafter {self.drafter!r} is not one of {', '.join(DRAFTERS)}")


@dataclass(slots=True)
class Parts:
    """What one arm runs on. A fault injection changes these before the arm starts."""

    target: Any
    cache: Any
    drafter: Any
    policy: Any
    settings: Settings
    stops: Stops


Tamper = Callable[[Parts], Parts]
Around = Callable[[], AbstractContextManager[Any]]


class ScriptedText:
    """See the module. It asks the reference for the text ahead."""

    def __init__(self, reference: Reference, depth: int, vocab: int):
        self.reference, self.vocab = reference, vocab
        self.script = self.script_of(depth)

    @staticmethod
    def script_of(depth: int) -> list[int]:
        """Accepted counts, pass by pass. What breaks most often comes first: all, none, and one after the other."""
        pairs = itertools.product(range(depth, -1, -1), repeat=2)
        ends = sorted(pairs, key=lambda pair: not set(pair) <= {0, depth})
        return [n for pair in ends for n in pair]

    def begin(self, prompt: Sequence[int]) -> None:
        self.drafts = 0

    def prime(self, tokens: mx.array, hidden: mx.array | None) -> list[mx.array]:
        return []

    def observe(self, tokens: Sequence[int], hidden: mx.array | None, accepted: int) -> None:
        pass

    def draft(self, k: int, position: int) -> Draft | None:
        self.reference.reach(position + k - 1)
        ahead = self.reference.tokens[position : position + k]
        if not ahead:
            return None
        wrong = self.script[self.drafts % len(self.script)]
        self.drafts += 1
        if wrong < len(ahead):
            ahead[wrong] = (ahead[wrong] + 1) % self.vocab
        return Draft(mx.array(ahead))


def make_drafter(
    candidate: Candidate, head: Head | None, settings: Settings, reference: Reference, request: int
) -> Any:
    if candidate.drafter == "mtp":
        if head is None:
            raise RequestError(f"arm {candidate.name} needs an MTP head and the model was loaded without one")
        draws = Draws(settings.seed, request)
        return MTPDrafter(head, settings, draws, history=candidate.history, prime=candidate.prime)
    if candidate.drafter == "ngram":
        return NgramDrafter()
    if candidate.drafter == "scripted":
        vocab = reference.target.vocab or max(reference.prompt) + 1
        return ScriptedText(reference, candidate.depth or 1, vocab)
    return None


def begin(
    candidate: Candidate, parts: Parts, prompt: Sequence[int], *, clock: Clock, request: int
) -> Iterator[Prefill | Verify]:
    """The arm's records, from an empty cache."""
    common = {"settings": parts.settings, "stops": parts.stops, "clock": clock, "request": request}
    if candidate.drafter == "none" and candidate.depth is None and candidate.depths is None:
        return baseline(parts.target, parts.cache, prompt, **common)
    return speculative(parts.target, parts.cache, prompt, drafter=parts.drafter, policy=parts.policy, **common)


def make_policy(candidate: Candidate) -> Any:
    return FixedDepth(candidate.depth or 0) if candidate.depths is None else ReplayDepth(candidate.depths)


def nothing() -> AbstractContextManager[None]:
    return nullcontext()
