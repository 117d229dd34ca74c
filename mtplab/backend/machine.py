"""What the run ran on, as plain JSON values. What cannot be read is null, never a guess."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import runtime

PROC = Path("/proc")
POWER = Path("/sys/class/power_supply")
PACKAGES = ("mlx", "mlx-lm", "numpy", "scipy")


def read(path: Path) -> str | None:
    """The text of a small system file, or None."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return None


def ask(*command: str) -> str | None:
    """The output of a small system command (macOS keeps its facts behind those), or None."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()
    return None


def version(package: str) -> str | None:
    """The installed version, read from metadata: the package is not imported."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def meminfo(proc: Path = PROC) -> dict[str, int] | None:
    """/proc/meminfo in bytes, or None where there is none."""
    text = read(proc / "meminfo")
    if text is None:
        return None
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def memory(proc: Path = PROC) -> dict[str, int | None]:
    """Bytes: `total`, `available` (what programs can still get), `swap_total`, `swap_used`."""
    table = meminfo(proc)
    if table is not None:
        swap = table.get("SwapTotal")
        used = None if swap is None else swap - table.get("SwapFree", 0)
        return {
            "total": table.get("MemTotal"),
            "available": table.get("MemAvailable"),
            "swap_total": swap,
            "swap_used": used,
        }
    if sys.platform != "darwin":
        return dict.fromkeys(("total", "available", "swap_total", "swap_used"))
    return _memory_macos()


def _memory_macos() -> dict[str, int | None]:
    pages = dict(re.findall(r"Pages (free|inactive|speculative):\s+(\d+)", ask("vm_stat") or ""))
    size = _number(ask("sysctl", "-n", "hw.pagesize"))
    swap = dict(re.findall(r"(total|used) = ([\d.]+)M", ask("sysctl", "-n", "vm.swapusage") or ""))
    return {
        "total": _number(ask("sysctl", "-n", "hw.memsize")),
        "available": sum(map(int, pages.values())) * size if pages and size else None,
        "swap_total": round(float(swap["total"]) * 2**20) if "total" in swap else None,
        "swap_used": round(float(swap["used"]) * 2**20) if "used" in swap else None,
    }


def cpu() -> str | None:
    """The processor's name."""
    if sys.platform == "darwin":
        return ask("sysctl", "-n", "machdep.cpu.brand_string")
    named = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", read(PROC / "cpuinfo") or "", re.MULTILINE)
    return named[1].strip() if named else platform.processor() or None


def cores() -> int | None:
    """Cores that this process may use, which a container or `taskset` can make fewer than the machine has."""
    with contextlib.suppress(AttributeError, OSError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def power(folder: Path = POWER) -> dict[str, Any] | None:
    """`source` ("ac" or "battery") and `percent`, or None where the system does not tell (most servers)."""
    if sys.platform == "darwin":
        text = ask("pmset", "-g", "batt")
        if not text:
            return None
        percent = re.search(r"(\d+)%", text)
        return {
            "source": "ac" if "AC Power" in text else "battery",
            "percent": int(percent[1]) if percent else None,
        }
    return _power_linux(folder)


def _power_linux(folder: Path) -> dict[str, Any] | None:
    supplies = sorted(folder.iterdir()) if folder.is_dir() else []
    kinds = {s: read(s / "type") for s in supplies}
    # A wireless mouse is a battery too; it says so in `scope`.
    batteries = [s for s, k in kinds.items() if k == "Battery" and read(s / "scope") != "Device"]
    mains = [read(s / "online") for s, k in kinds.items() if k in ("Mains", "USB")]
    if not batteries and not mains:
        return None
    draining = any(read(s / "status") == "Discharging" for s in batteries)
    return {
        "source": "battery" if draining or (mains and "1" not in mains) else "ac",
        "percent": _number(read(batteries[0] / "capacity")) if batteries else None,
    }


def load_average() -> list[float] | None:
    """Runnable processes over 1, 5 and 15 minutes."""
    with contextlib.suppress(AttributeError, OSError):
        return [round(x, 2) for x in os.getloadavg()]
    return None


def facts() -> dict[str, Any]:
    """Everything a manifest records of the machine. `device`, `blas` and `compile` are null before `setup()`."""
    return {
        "os": platform.system(),
        "os_release": platform.release(),
        "arch": platform.machine(),
        "cpu": cpu(),
        "cores": cores(),
        "memory": memory(),
        "load_average": load_average(),
        "power": power(),
        "python": platform.python_version(),
        **{name.replace("-", "_"): version(name) for name in PACKAGES},
        **runtime.facts(),
    }
