"""Watch one module's calls without touching its class or its place in the parameter tree.

The instance gets a one-off subclass of its own class whose `__call__` reports to an observer; every other
instance and every parameter path stays as it was, and `untap` puts the class back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn

Observer = Callable[[tuple, dict, Any], None]


def tap(module: nn.Module, observer: Observer) -> None:
    """Call `observer(args, kwargs, output)` after every call of this instance."""
    original = type(module)

    class Tapped(original):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = super().__call__(*args, **kwargs)
            observer(args, kwargs, out)
            return out

    Tapped.__name__ = Tapped.__qualname__ = original.__name__
    Tapped._tapped = original  # type: ignore[attr-defined]
    module.__class__ = Tapped


def untap(module: nn.Module) -> None:
    """Undo the last `tap` of this instance."""
    original = getattr(type(module), "_tapped", None)
    if original is not None:
        module.__class__ = original
