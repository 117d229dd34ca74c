"""The same counts under other systems' definitions, so that a number can be laid beside a log line of theirs.

Each entry carries the system's name in its label and its definition in words, because the short names collide:
three of these systems print one word for three different quotients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mtplab.errors import RequestError
from mtplab.records import metrics
from mtplab.records.types import Request


@dataclass(frozen=True, slots=True)
class Entry:
    """One number as another system defines it. `label` names the system; `definition` says what is divided by what."""

    label: str
    value: float | list[float | None] | None
    definition: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _drafting(requests: Sequence[Request]) -> metrics.Counts:
    """Only passes that proposed something: the other systems do not count a plain step as a speculative one."""
    c = metrics.counts(requests)
    return metrics.Counts(*(x[c.proposed > 0] for x in c))


def _per_position(c: metrics.Counts) -> list[float | None] | None:
    """Accepted at position i over ALL drafting passes: unlike `survival`, a shorter proposal counts as a miss."""
    positions = range(c.proposed.max(initial=0))
    return [metrics.divide((c.accepted > i).sum(), c.accepted.size) for i in positions] or None


def _length(c: metrics.Counts) -> float | None:
    return metrics.divide((c.accepted + 1).sum(), c.accepted.size)


def _share(c: metrics.Counts) -> float | None:
    return metrics.divide(c.accepted.sum(), c.proposed.sum())


def _vllm(requests: Sequence[Request]) -> list[Entry]:
    c = _drafting(requests)
    return [
        Entry(
            "vLLM mean acceptance length",
            _length(c),
            "1 + accepted drafts / passes that drafted; the bonus or correction token is included",
        ),
        Entry("vLLM draft acceptance rate", _share(c), "accepted drafts / proposed drafts"),
        Entry(
            "vLLM per-position acceptance rate",
            _per_position(c),
            "passes that accepted position i / all passes that drafted, whether or not they proposed that far",
        ),
    ]


def _sglang(requests: Sequence[Request]) -> list[Entry]:
    c = _drafting(requests)
    rows = (c.proposed + 1).sum()
    return [
        Entry(
            "SGLang accept length",
            _length(c),
            "(accepted drafts + one bonus or correction token per verify) / verifies",
        ),
        Entry(
            "SGLang accept rate (old)",
            metrics.divide((c.accepted + 1).sum(), rows),
            "(accepted drafts + bonus tokens) / (proposed drafts + root tokens): bonus above, root below the line",
        ),
        Entry("SGLang accept rate (strict)", _share(c), "accepted drafts / proposed drafts, without bonus and root"),
    ]


def _omlx(requests: Sequence[Request]) -> list[Entry]:
    text = "accepted drafts / examined drafts: drafts after the first rejection of a pass are not counted"
    return [Entry("oMLX draft acceptance", metrics.examined_acceptance(requests), text)]


def _llamacpp(requests: Sequence[Request]) -> list[Entry]:
    c = _drafting(requests)
    return [
        Entry("llama.cpp draft acceptance", _share(c), "accepted drafts / generated drafts"),
        Entry(
            "llama.cpp mean acceptance length",
            _length(c),
            "1 + accepted drafts / verification steps; the bonus or correction token is included",
        ),
        Entry(
            "llama.cpp acceptance rate per position",
            _per_position(c),
            "steps that accepted position i / all verification steps",
        ),
    ]


def _gptfast(requests: Sequence[Request]) -> list[Entry]:
    accepted = _drafting(requests).accepted
    shares = [metrics.divide(n, accepted.size) for n in np.bincount(accepted)] or None
    return [
        Entry(
            "gpt-fast mean accepted",
            metrics.divide(accepted.sum(), accepted.size),
            "accepted drafts / verifies, the bonus or correction token NOT included",
        ),
        Entry("gpt-fast acceptance probs", shares, "share of verifies with exactly i accepted drafts, i = 0, 1, ..."),
    ]


def _mlxlm(requests: Sequence[Request]) -> list[Entry]:
    text = "returned tokens with from_draft set / all returned tokens, the first one included"
    return [Entry("mlx-lm from_draft share", metrics.draft_share(requests), text)]


DIALECTS: dict[str, Callable[[Sequence[Request]], list[Entry]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "omlx": _omlx,
    "llamacpp": _llamacpp,
    "gptfast": _gptfast,
    "mlxlm": _mlxlm,
}


def translate(requests: Sequence[Request], dialect: str) -> list[Entry]:
    """The counts of these requests as `dialect` would print them; an unknown dialect is a RequestError naming all."""
    if dialect not in DIALECTS:
        raise RequestError(f"unknown dialect {dialect!r}; choose one of {', '.join(DIALECTS)}")
    return DIALECTS[dialect](requests)
