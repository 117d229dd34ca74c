"""What each emitted token was: the base of coloured text, on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Iterator

from mtplab.records.types import Prefill, Request, Verify

ROLES = {
    "first": "from the prefill",
    "step": "an ordinary step: nothing was proposed",
    "draft": "an accepted draft",
    "bonus": "the model's own token after a full match",
    "correction": "the model's own token in place of a rejected draft",
}


def roles_of(record: Prefill | Verify) -> Iterator[tuple[int, str]]:
    """(token, role) of every token that this record emitted."""
    if isinstance(record, Prefill):
        if record.emitted:
            yield record.token, "first"
        return
    last = "step" if not record.proposed else "bonus" if record.accepted == record.proposed else "correction"
    for place, token in enumerate(record.emitted_tokens):
        yield token, "draft" if place < record.accepted else last


def request_roles(request: Request) -> list[str]:
    """The role of each of a request's tokens."""
    records = (request.prefill, *request.verifies)
    return [role for record in records for _, role in roles_of(record)]
