"""Which BLAS mlx multiplies with. It is chosen once, before mlx is imported, and written into every record.

On Linux the mlx wheel links the reference BLAS: 4-8 GFLOP/s, cost linear in the rows, every row bit-identical
whatever the width. A library loaded with RTLD_GLOBAL before mlx is found first by the loader, and mlx then calls
its `cblas_sgemm`: OpenBLAS is 20-60 times faster, four rows cost about as much as one, and rows are not
bit-identical across widths. So this choice decides both speed and equality.

    MTPLAB_BLAS=auto        OpenBLAS if it can be had, else the reference BLAS and one line of notice (default)
    MTPLAB_BLAS=reference   what the mlx wheel links
    MTPLAB_BLAS=PATH        a shared library that exports cblas_sgemm
    MTPLAB_BLAS_THREADS=1   OpenBLAS threads spin at their barriers and collapse beside any busy process

On macOS mlx links Accelerate and runs on Metal: nothing is loaded there (macOS was not run here).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from ..errors import RequestError
from . import elf, openblas

CHOICES = "auto, reference, or the path of a shared library that exports cblas_sgemm"


@dataclasses.dataclass(frozen=True, slots=True)
class BlasInfo:
    """The BLAS in force. `notice` is one line for the user when something was not as asked for, else None."""

    kind: str  # "reference", "openblas", "accelerate" or "custom"
    name: str
    version: str | None
    path: str | None
    threads: int | None  # None where the library does not tell
    notice: str | None
    core: str | None = None  # the processor kernel that OpenBLAS picked


_active: BlasInfo | None = None
_choice = ""  # what _active was chosen by


class _Address(ctypes.Structure):
    """What `dladdr` fills in: file name, load address, symbol name, symbol address."""

    _fields_ = tuple(zip("fbns", (ctypes.c_char_p, ctypes.c_void_p) * 2, strict=True))


def _global_blas() -> str | None:
    """The file whose `cblas_sgemm` the loader finds first for a library loaded from now on, or None."""
    everything = ctypes.CDLL(None)
    try:
        address = ctypes.cast(everything.cblas_sgemm, ctypes.c_void_p)
    except AttributeError:
        return None
    found = _Address()
    with contextlib.suppress(AttributeError):
        if everything.dladdr(address, ctypes.byref(found)) and found.f:
            return os.fsdecode(found.f)
    return "an unknown file"


def _mlx_loaded() -> bool:
    return "mlx.core" in sys.modules


def _threads() -> int:
    text = os.environ.get("MTPLAB_BLAS_THREADS", "").strip() or "1"
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise RequestError(f"MTPLAB_BLAS_THREADS is {text!r}; it must be a whole number from 1 to 1024")
    return int(text)


def _text(library: ctypes.CDLL, function: str) -> str | None:
    try:
        call = getattr(library, function)
    except AttributeError:
        return None
    call.restype = ctypes.c_char_p
    return (call() or b"").decode("ascii", "replace") or None


def _describe(library: ctypes.CDLL, path: str, kind: str, threads: int) -> BlasInfo:
    """Set the threads where the library lets us, and report what is in force, with a notice where it differs."""
    config = _text(library, "openblas_get_config")
    if config is None:
        asked = os.environ.get("MTPLAB_BLAS_THREADS")
        notice = f"BLAS: the threads of {path} cannot be set from here; MTPLAB_BLAS_THREADS has no effect"
        return BlasInfo(kind, Path(path).name, None, path, None, notice if asked else None)
    library.openblas_set_num_threads(threads)
    effective = library.openblas_get_num_threads()
    notice = None if effective == threads else f"BLAS: {threads} threads asked for, OpenBLAS runs {effective}"
    version = re.search(r"OpenBLAS (\d[\w.]*)", config)
    core = _text(library, "openblas_get_corename")
    return BlasInfo(kind, "OpenBLAS", version[1] if version else None, path, effective, notice, core)


def _load(path: Path, kind: str, threads: int) -> BlasInfo:
    """Load `path` for everything that follows. Raises OSError when the loader refuses it."""
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    found = _global_blas()
    if found is None or not os.path.samefile(found, path):
        raise RequestError(
            f"cblas_sgemm of {found} is already in this process and hides {path}; start without it (LD_PRELOAD?)"
        )
    return _describe(library, str(path), kind, threads)


def _custom(choice: str, threads: int) -> BlasInfo:
    path = Path(choice).expanduser().absolute()
    try:
        if not path.is_file():
            raise RequestError(f"MTPLAB_BLAS is {choice!r}, which is no file; give {CHOICES}")
        names = elf.exported(path)
        if elf.machine(path) != elf.machine(Path("/proc/self/exe")):
            raise RequestError(f"MTPLAB_BLAS {path} is for another processor; give a library of {platform.machine()}")
    except elf.NotALibrary as error:
        raise RequestError(f"MTPLAB_BLAS {path} cannot be loaded: {error}; give {CHOICES}") from None
    except OSError as error:
        raise RequestError(f"MTPLAB_BLAS {path} cannot be read: {error.strerror or error}") from None
    if "cblas_sgemm" not in names:
        raise RequestError(f"MTPLAB_BLAS {path} does not export cblas_sgemm, which mlx calls; give {CHOICES}")
    try:
        return _load(path, "custom", threads)
    except OSError as error:
        raise RequestError(f"MTPLAB_BLAS {path} cannot be loaded: {error}") from None


def _reference(notice: str | None = None) -> BlasInfo:
    return BlasInfo("reference", "the reference BLAS in the mlx wheel", None, None, 1, notice)


def _preloaded(found: str, threads: int) -> BlasInfo:
    """Somebody else's library comes first; say what is in force instead of what we would have chosen."""
    notice = f"BLAS: {found} was already in this process (LD_PRELOAD?) and stays in force"
    return dataclasses.replace(_describe(ctypes.CDLL(None), found, "custom", threads), notice=notice)


def _auto(threads: int) -> BlasInfo:
    try:
        path, _ = openblas.prepare()
        return _load(path, "openblas", threads)
    except (openblas.Unavailable, OSError) as error:
        return _reference(f"BLAS: slow reference instead of OpenBLAS, since {error}")


def _choose(choice: str, threads: int) -> BlasInfo:
    if sys.platform == "darwin":
        if choice != "auto":
            raise RequestError(f"MTPLAB_BLAS is {choice!r}, but on macOS mlx always uses Accelerate; leave it unset")
        return BlasInfo("accelerate", "Accelerate", platform.mac_ver()[0] or None, None, None, None)
    if not sys.platform.startswith("linux"):
        if choice not in ("auto", "reference"):
            raise RequestError(f"MTPLAB_BLAS is {choice!r}, but a BLAS can only be chosen on Linux; leave it unset")
        return _reference()
    found = _global_blas()
    if choice == "reference" and found:
        raise RequestError(f"MTPLAB_BLAS is 'reference', but {found} is already loaded (LD_PRELOAD?); start without it")
    if choice == "reference":
        return _reference()
    if choice == "auto" and found:
        return _preloaded(found, threads)
    if choice == "auto" and _mlx_loaded():
        return _reference("BLAS: mlx was imported before mtplab could choose, so the slow reference stays")
    if _mlx_loaded():
        raise RequestError(f"mlx is already imported, so MTPLAB_BLAS {choice!r} comes too late; choose before that")
    return _auto(threads) if choice == "auto" else _custom(choice, threads)


def _wanted(choice: str | None) -> str:
    text = (choice if choice is not None else os.environ.get("MTPLAB_BLAS", "")).strip()
    return text or "auto"


def activate(choice: str | None = None) -> BlasInfo:
    """Choose and load the BLAS; call it before `import mlx.core`. Later calls return what is in force.

    `choice`: "auto", "reference" or a path; None reads MTPLAB_BLAS. Raises RequestError for a choice that cannot
    be honoured, also for one that differs from an earlier one: a loaded library cannot be taken out again.
    """
    global _active, _choice
    if _active is not None:
        if choice is not None and _wanted(choice) not in (_choice, _active.kind, _active.path):
            since = "mlx is already imported with it" if _mlx_loaded() else "it is chosen once per process"
            raise RequestError(f"the BLAS is {_active.kind}, not {_wanted(choice)}: {since}; start a new process")
        return _active
    wanted, threads = _wanted(choice), _threads()
    _active, _choice = _choose(wanted, threads), wanted
    return _active


def info() -> BlasInfo | None:
    """The BLAS in force, or None before `activate`."""
    return _active


def to_json() -> dict[str, Any] | None:
    """`info()` as a JSON-able dict."""
    return None if _active is None else dataclasses.asdict(_active)
