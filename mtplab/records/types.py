"""What a decoder reports: counts and nanoseconds, never ratios.

A decoder yields one `Prefill` and then one `Verify` per verify pass; a consumer collects them into a `Request`.
Every speculative number mtplab prints is a function of these (see `metrics`). With N the tokens returned,

    N = prefill.emitted + sum(verify.emitted)

The baseline yields `Verify` records too, with nothing proposed: one token per pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prompt's forward passes. `emitted` is 1 (the first token comes from the last prompt token) or 0."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in a cache and not processed again
    step: int  # chunk size; the last prompt token is always its own pass
    forwards: int  # target-size forward passes
    emitted: int
    token: int | None  # the first emitted token
    cut: str | None  # "eos", "stop" or "cap" when the first token already ends the request
    start_ns: int
    end_ns: int  # when the first token was on the host


@dataclass(frozen=True, slots=True)
class Verify:
    """One verify pass. Pass s proposes `proposed` drafts, the first `accepted` of them match, and
    `accepted + 1` tokens are committed (the last is the bonus after a full match, else the correction), of
    which `emitted` survive the cut at EOS, stop string or token cap.
    """

    index: int  # pass number in the request, from 0
    position: int  # tokens emitted before this pass (the prefill's token included)
    depth: int  # what the policy asked for; a drafter may propose fewer
    proposed: int
    accepted: int
    emitted: int
    cut: str | None  # "eos", "stop", "cap" or None
    cache_before: int  # rows in the target cache before and after the pass
    cache_after: int
    drafts: tuple[int, ...]
    tokens: tuple[int, ...]  # committed tokens before the cut: accepted + 1 of them
    start_ns: int
    end_ns: int  # when the pass's tokens were on the host; all of them share it (a burst)
    draft_ns: int | None = None  # None unless draft and verify were fenced apart

    @property
    def examined(self) -> int:
        """Drafts the verdict depends on: all accepted ones and the first rejected one."""
        return self.accepted if self.accepted == self.proposed else self.accepted + 1

    @property
    def emitted_tokens(self) -> tuple[int, ...]:
        return self.tokens[: self.emitted]

    @property
    def pass_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Request:
    """One finished request: its records and the effective value of every setting."""

    id: str  # prompt id, unique within a run
    corpus: str
    prefill: Prefill
    verifies: tuple[Verify, ...]
    finish: str  # "eos", "stop" or "cap"
    settings: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def tokens(self) -> tuple[int, ...]:
        first = () if self.prefill.token is None else (self.prefill.token,)
        return first + tuple(t for v in self.verifies for t in v.emitted_tokens)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        """Rebuild a request from `to_json`'s dict; a foreign schema number is an error that names it."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"this record has schema {data.get('schema')!r}; this mtplab reads schema {SCHEMA}")
        passes = tuple(
            Verify(**{**v, "drafts": tuple(v["drafts"]), "tokens": tuple(v["tokens"])}) for v in data["verifies"]
        )
        fields = {k: data[k] for k in ("id", "corpus", "finish", "settings", "schema")}
        return cls(prefill=Prefill(**data["prefill"]), verifies=passes, **fields)
