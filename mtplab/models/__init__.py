"""Checkpoints as targets, MTP heads and transactional caches.

Importing this package imports mlx: call `mtplab.backend.setup()` first, it chooses the BLAS.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtplab.errors import ModelError, RequestError

DATA = Path(__file__).resolve().parent.parent / "data"
BUNDLED = ("lab-mtp", "lab-canvas")

__all__ = ["BUNDLED", "bundled", "load_target"]


def bundled(name: str) -> Path:
    """The folder of a model that ships with mtplab."""
    if name not in BUNDLED:
        raise RequestError(f"no bundled model is called {name!r}; there is {', '.join(BUNDLED)}")
    if not (DATA / name / "config.json").is_file():
        raise ModelError(f"the bundled model {name} is missing from this installation; install mtplab again")
    return DATA / name


def load_target(name: Any, **options: Any) -> Any:
    """See `mtplab.models.loader.load_target`; a bundled model may be named without its path."""
    from mtplab.models import loader

    return loader.load_target(bundled(name) if name in BUNDLED else name, **options)
