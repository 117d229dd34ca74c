"""The definitions of the numbers: records, metrics, intervals, other systems' dialects, summaries.

Needs no MLX and works on another engine's logs. The public names are resolved on first use, so importing this
package loads neither numpy nor scipy.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "SCHEMA": "types",
    "Prefill": "types",
    "Verify": "types",
    "Request": "types",
    "Interval": "statistics",
    "prompt_bootstrap": "statistics",
    "paired_bootstrap": "statistics",
    "DIALECTS": "dialects",
    "translate": "dialects",
    "summarize": "summary",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
