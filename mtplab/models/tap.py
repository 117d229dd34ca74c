"""Watch one module's calls without touching its class or its place in the parameter tree (see `backend.instances`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn

from mtplab.backend.instances import overridden, override

Observer = Callable[[tuple, dict, Any], None]


def tap(module: nn.Module, observer: Observer, method: str = "__call__") -> Callable[[], None]:
    """Call `observer(args, kwargs, output)` after every call of this instance; returns what takes it away again."""

    def watched(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        observer(args, kwargs, out)
        return out

    restore = override(module, watched, method)
    watched.restore = restore  # type: ignore[attr-defined]
    return restore


def untap(module: nn.Module) -> None:
    """Undo the last `tap` of this instance."""
    taps = [call for call in overridden(module) if hasattr(call, "restore")]
    if taps:
        taps[-1].restore()
