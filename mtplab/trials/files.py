"""Files written whole or not at all: to a temporary name beside the goal, synced, then renamed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mtplab.errors import RequestError

FULL = (errno.ENOSPC, errno.EDQUOT)


def clean(value: Any) -> Any:
    """The same JSON value with NaN and infinities as null, tuples as lists and keys as strings."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [clean(v) for v in value]
    if value is None or isinstance(value, (str, int, bool)):
        return value
    # numpy scalars know how to become Python's; anything else is shown as text.
    return clean(value.item()) if hasattr(value, "item") else str(value)


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON in one line (or indented); never NaN or Infinity."""
    return json.dumps(clean(value), indent=indent, allow_nan=False, ensure_ascii=False)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """An OSError on `path` becomes one sentence with the way out (exit 2)."""
    try:
        yield
    except OSError as error:
        raise RequestError(sentence(error, path)) from error
    except RuntimeError as error:
        if "[write]" not in str(error):  # how mlx says that it could not write a file
            raise
        raise RequestError(f"cannot write {path}: {error}; free some space, or choose another --out") from error


def sentence(error: OSError, path: Path | str) -> str:
    """What went wrong with a path, and what to do."""
    if error.errno in FULL:
        return f"no space is left on the device while writing {path}; free some, or choose another --out"
    return f"cannot write {path}: {error.strerror or error}; choose another --out"


@contextmanager
def whole(path: Path, suffix: str = "") -> Iterator[Path]:
    """Write a file atomically: the body writes to the path it is given, which then takes the place of `path`.

    On any failure the old file stays and no temporary is left. `suffix`: for writers that look at the name.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp{suffix}")
    try:
        with explained(path):
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text atomically, see `whole`."""
    with whole(path) as temporary, open(temporary, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


def write_json(path: Path, value: Any) -> None:
    write_text(path, dumps(value, indent=1) + "\n")


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
