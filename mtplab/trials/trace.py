"""Every record of a decoder as one JSON line, written while it decodes.

A trace is a log: it is opened under its final name and grows, so that what was decoded before an interruption is
there to be read. It never changes what it watches: the records pass through, and a line is made from a record that is
finished. Lines are buffered and flushed when a request ends, since a pass of a small model takes 3 ms and a system
call in each would show.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import TracebackType

from mtplab.errors import RequestError
from mtplab.records.canvas import Canvas, DenoiseStep
from mtplab.records.types import SCHEMA, Prefill, Verify

BUFFER_BYTES = 1 << 18  # some 600 records
KINDS = {"prefill": Prefill, "verify": Verify, "step": DenoiseStep, "canvas": Canvas}
LISTS = ("drafts", "tokens", "held", "settled")  # tuples, which JSON has no word for
_COLUMNS = {cls: (kind, tuple(f.name for f in fields(cls))) for kind, cls in KINDS.items()}
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode
Record = Prefill | Verify | DenoiseStep | Canvas


class TraceWriter:
    """`with TraceWriter(path) as trace: for record in trace.watch(decoder, request="0"): ...`"""

    def __init__(self, path: Path | str):
        """Open a new file. One that exists, or a folder that cannot be written, is a RequestError."""
        self.path = Path(path)
        try:
            self._file = open(self.path, "x", encoding="utf-8", buffering=BUFFER_BYTES)  # noqa: SIM115
        except FileExistsError:
            raise RequestError(f"--trace {self.path} exists; name another file or remove it") from None
        except OSError as error:
            raise RequestError(f"--trace {self.path} cannot be written ({error.strerror})") from error

    def watch(self, records: Iterator[Record], *, request: str) -> Iterator[Record]:
        """Pass the records on unchanged, each written before it is handed over; flushed at the request's end."""
        try:
            for record in records:
                self.write(record, request)
                yield record
        finally:
            self._flush()

    def write(self, record: Record, request: str) -> None:
        kind, names = _COLUMNS[type(record)]
        row = {"schema": SCHEMA, "kind": kind, "request": request}
        for name in names:
            row[name] = getattr(record, name)
        try:
            self._file.write(_encode(row) + "\n")
        except OSError as error:
            raise self._broken(error) from error

    def _flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise self._broken(error) from error

    def _broken(self, error: OSError) -> RequestError:
        return RequestError(f"--trace {self.path} ends early ({error.strerror}); free some space or leave it out")

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._broken(error) from error

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_trace(path: Path | str) -> Iterator[tuple[str, Record]]:
    """(request, record) of every line. A line cut off by an interruption at the end is left out.

    Raises RequestError for a foreign schema number, naming the line.
    """
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            row = json.loads(line)
            schema, kind, request = (row.pop(k) for k in ("schema", "kind", "request"))
            if schema != SCHEMA:
                raise RequestError(f"{path}, line {number}: schema {schema!r}; this mtplab reads schema {SCHEMA}")
            tuples = {k: tuple(row[k]) for k in LISTS if k in row}
            yield request, KINDS[kind](**row | tuples)
