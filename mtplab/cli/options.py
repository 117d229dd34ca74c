"""Options that several verbs share, and how results leave. Flag names are mlx-lm's where it has them."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated

import typer

from mtplab.cli import ReaderLeft
from mtplab.errors import RequestError

FORMATS = ("table", "md", "csv", "json", "jsonl")

Model = Annotated[str, typer.Option("--model", help="Bundled name, checkpoint folder or hub id (owner/name).")]
Output = Annotated[str, typer.Option("-o", "--output", help="table, md, csv, json or jsonl.")]
History = Annotated[
    str | None,
    typer.Option("--history", help="What the head keeps: verified, drafted, none [verified].", show_default=False),
]
Prime = Annotated[
    bool | None, typer.Option("--prime/--no-prime", help="Give the head the prompt [on].", show_default=False)
]
Drafts = Annotated[
    str | None,
    typer.Option(
        "--drafts", help="Under temperature: sampled, or the head's first choice, point [sampled].", show_default=False
    ),
]
Recursion = Annotated[
    str | None, typer.Option("--recursion", help="What the next depth gets: final or block [the family's].")
]
Hidden = Annotated[str | None, typer.Option("--hidden", help="What the head takes: post or pre [the family's].")]
HeadNorms = Annotated[
    str | None, typer.Option("--head-norms", help="Stored norms of the head: raw or shifted [recognised].")
]
AssistantFolder = Annotated[
    str | None, typer.Option("--assistant", help="Gemma 4: checkpoint of the assistant that drafts [none].")
]
Head = Annotated[
    str | None, typer.Option("--head", help="A head in a folder of its own (from head train) [the checkpoint's].")
]
Verify = Annotated[
    str | None,
    typer.Option(
        "--verify", help="How drafts are checked: batched, rowwise, fixed, serial [batched].", show_default=False
    ),
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Let the checkpoint run its own Python file.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


def check_format(form: str, allowed: tuple[str, ...] = FORMATS) -> str:
    """A wrong format is found before the work, not after it."""
    if form not in allowed:
        raise RequestError(f"output format {form!r} is not one of {', '.join(allowed)}")
    return form


def out(text: str) -> None:
    """The result. One write, so that a reader never sees half a document."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderLeft from error


def tell(text: str) -> None:
    """Everything that is not the result. That nobody reads it is no reason to stop."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
