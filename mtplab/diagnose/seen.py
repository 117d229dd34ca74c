"""What a lane finds: counts, extremes, the places where its arm leaves the baseline, and what rounding cannot do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mtplab.diagnose.reference import Choice
from mtplab.diagnose.state import LeafDiff


@dataclass(frozen=True, slots=True)
class Leave:
    """A row whose choice is not the baseline's token."""

    position: int  # in the output
    verify: int  # the pass, -1 for the prefill
    depth: int  # rows of the block minus one
    token: int  # the baseline's
    other: int  # the arm's
    gap: float  # baseline's logits: its token over the arm's
    arm: Choice
    baseline: Choice
    row_diff: float  # largest |difference| of the row's logits
    logit: float  # the row's largest logit, for its size in ulps
    noise: float | None = None  # the shadow's distance from the baseline on the rows of this block


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that rounding cannot do. `layer` None: not a layer's."""

    kind: str  # "selection", "fed", "prefill", "acceptance", "rows", "state", "head", "length", "logits", "block"
    position: int
    verify: int
    layer: int | None
    text: str
    counted: bool = False  # shown by counts and ids: no rounding, not even an irreproducible model, explains it


@dataclass(slots=True)
class Seen:
    """What a lane found. Counts and extremes, no rows."""

    compared: int = 0
    end: str | None = None
    leaves: list[Leave] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    rows_differ: int = 0
    first_differs: int | None = None  # position of the first of them
    row_diffs: list[float] = field(default_factory=list)  # of the rows that differ
    state_equal: int = 0  # verifies whose whole state was equal in every bit
    state_rounded: int = 0
    worst: LeafDiff | None = None  # largest relative difference of a state, and where it was
    worst_at: tuple[int, int] = (0, 0)  # (position, verify)
    first_rounded: tuple[int, int, int] | None = None  # (position, verify, layer)
    accepted: Counter = field(default_factory=Counter)  # (proposed, accepted) -> passes
    second_rejects: int = 0  # passes that rejected right after a pass that rejected
    wrapped: bool = False  # a sliding window was full
    layers: dict[int, tuple[int, float]] = field(default_factory=dict)  # layer -> states that differ, largest relative
    passes: list[tuple[tuple[int, ...], int]] = field(default_factory=list)  # (drafts, tokens kept) of every pass
    head_audited: int = 0
    # with a shadow only
    shadow_rows: int = 0  # rows compared with the shadow
    shadow_row_diff: float = 0.0  # largest difference between arm and shadow
    noise: float = 0.0  # largest difference between shadow and baseline
    shadow_states: int = 0  # states compared with the shadow's
    shadow_states_equal: int = 0
    state_noise: float = 0.0  # largest relative distance of the shadow's state from the baseline's

    @property
    def off(self) -> float:
        """How far a state was off at most, of itself."""
        return self.worst.relative if self.worst is not None else 0.0
