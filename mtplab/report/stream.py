"""Decoder records -> text as it appears, coloured by where each token came from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from mtplab.records import metrics
from mtplab.records.types import Prefill, Request, Verify
from mtplab.report.roles import ROLES, roles_of
from mtplab.report.tables import number, picture

SGR = {"draft": "32", "bonus": "36", "correction": "33"}  # green, cyan, yellow; the rest stays as it is
RESET = "\x1b[0m"


class TextStream(Protocol):
    """A tokenizer's stream: text deltas of a growing token list."""

    def add(self, token: int) -> str: ...
    def flush(self) -> str: ...


class Painter:
    """Feeds on records, gives printable text.

    A stop string may begin in one token and end in another, so as many characters as could be its beginning are held
    back until it is clear. `safe` shows control characters as pictures: a model's text must not steer a terminal.
    """

    def __init__(self, stream: TextStream, *, stop: Iterable[str] = (), colour: bool = False, safe: bool = False):
        self.stream, self.stop = stream, tuple(stop)
        self.colour, self.safe = colour, safe
        self.text = ""  # everything shown so far, without colours
        self._held: list[tuple[str, str]] = []  # (one character, its role)
        self._keep = max((len(s) for s in self.stop), default=1) - 1

    def feed(self, record: Prefill | Verify) -> str:
        """The text that this record completes, ready to be written."""
        for token, role in roles_of(record):
            self._held += [(c, role) for c in self.stream.add(token)]
        if record.cut:
            return self._finish(record.cut)
        return self._show(len(self._held) - self._keep)

    def _finish(self, cut: str) -> str:
        self._held += [(c, "step") for c in self.stream.flush()]
        held = "".join(c for c, _ in self._held)
        found = [held.find(s) for s in self.stop if s in held] if cut == "stop" else []
        return self._show(min(found, default=len(held)))

    def _show(self, count: int) -> str:
        shown, self._held = self._held[: max(0, count)], self._held[max(0, count) :]
        self.text += "".join(c for c, _ in shown)
        out, last = "", ""
        for character, role in shown:
            code = SGR.get(role, "") if self.colour else ""
            if code != last:
                out, last = out + (RESET if last else "") + (f"\x1b[{code}m" if code else ""), code
            out += picture(character) if self.safe else character
        return out + (RESET if last else "")


def legend() -> str:
    """What the colours of `--show` mean."""
    return ", ".join(f"\x1b[{SGR[r]}m{r}{RESET} = {ROLES[r]}" for r in SGR)


FINISH = {"eos": "end of text", "stop": "stop string", "cap": "token cap"}


def statistics(request: Request) -> dict[str, Any]:
    """The numbers of one request, by their names in the metrics table."""
    acceptance = metrics.draft_acceptance([request])
    return {
        "tokens": metrics.emitted_total([request]),
        "prompt_tokens": request.prefill.prompt_tokens,
        "tok_s": metrics.tok_s([request]),
        "tpot_ms": metrics.tpot_ms(request),
        "prefill_ms": (request.prefill.end_ns - request.prefill.start_ns) / 1e6,
        "verifies": len(request.verifies),
        "tokens_per_verify": metrics.tokens_per_verify([request]),
        "draft_acceptance": acceptance.value,
        "draft_acceptance_depth": acceptance.depth,
        "mean_depth": metrics.mean_depth([request]),
        "loop_share": metrics.loop_share([request]),
        "finish": request.finish,
    }


def statistics_line(request: Request) -> str:
    """The same in one line; what is not defined is left out."""
    s = statistics(request)
    parts = [
        str(request.settings.get("arm", "")),
        f"{s['tokens']} tokens",
        f"{number(s['tok_s'], 1)} tok/s" if s["tok_s"] else "",
        f"tokens_per_verify {number(s['tokens_per_verify'])}" if s["tokens_per_verify"] else "",
        f"draft_acceptance@{s['draft_acceptance_depth']} {number(s['draft_acceptance'])}"
        if s["draft_acceptance"] is not None
        else "",
        f"mean_depth {number(s['mean_depth'], 1)}" if s["mean_depth"] is not None else "",
        f"loop_share {number(s['loop_share'])}" if s["loop_share"] is not None else "",
        f"prefill {s['prompt_tokens']} tokens in {number(s['prefill_ms'], 0)} ms",
        f"ended by {FINISH.get(s['finish'], s['finish'])}",
    ]
    return " | ".join(p for p in parts if p)
