"""The errors mtplab shows a person: one sentence that names the value and the way out, and an exit code."""

from __future__ import annotations


class MtplabError(Exception):
    """Base of every expected error. `code` becomes the exit code of the command line."""

    code = 2


class RequestError(MtplabError):
    """The request was wrong: an unknown flag, an impossible value, an unreadable or unwritable path (exit 2)."""

    code = 2


class ModelError(MtplabError):
    """The model or one of its files is wrong (exit 3)."""

    code = 3


class TrialsFailed(MtplabError):
    """Some trials failed; the rest are stored (exit 4)."""

    code = 4
