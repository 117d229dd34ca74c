"""Canvas models: checkpoints that fill a block of positions over several denoising steps.

    model = load_denoiser("lab-canvas")        # a bundled name, a folder or a hub id

`base.Denoiser` is the surface; `gemma` (DiffusionGemma) and `llada` (LLaDA 2) are the families. Importing this package
imports no mlx; `load_denoiser` and the modules that compute do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mtplab.models.canvas.names import is_canvas

if TYPE_CHECKING:
    from mtplab.models.canvas.base import Denoiser

__all__ = ["is_canvas", "load_denoiser"]


def load_denoiser(name: str | Path, *, dtype: str | None = None) -> Denoiser:
    """See `loading.load`; a bundled model may be named without its path."""
    from mtplab.models import BUNDLED, bundled
    from mtplab.models.canvas import loading

    return loading.load(bundled(str(name)) if str(name) in BUNDLED else name, dtype=dtype)
