"""The one way into mlx: choose the BLAS, import mlx, and settle what depends on the device."""

from __future__ import annotations

import os
import sys
from typing import Any

from ..errors import RequestError
from . import blas

_compile: bool | None = None  # None before setup


def setup(choice: str | None = None) -> blas.BlasInfo:
    """Activate the BLAS (see `blas.activate`), import mlx and, on the CPU, turn `mx.compile` off.

    On the CPU `mx.compile` starts a C++ compiler (12-25 s the first time, and fails where there is none).
    Returns the BLAS in force. Idempotent. Raises RequestError.
    """
    global _compile
    active = blas.activate(choice)
    try:
        import mlx.core as mx
    except ImportError as error:
        raise RequestError(f"mlx cannot be imported ({error}); install it with: pip install 'mlx[cpu]'") from None
    if _compile is None:
        _compile = device() != "cpu" and "MLX_DISABLE_COMPILE" not in os.environ
        if not _compile:
            mx.disable_compile()
    return active


def device() -> str | None:
    """ "cpu" or "gpu", or None before mlx is imported."""
    if "mlx.core" not in sys.modules:
        return None
    import mlx.core as mx

    return "cpu" if mx.default_device().type == mx.cpu else "gpu"


def compile_on() -> bool | None:
    """Whether `mx.compile` compiles in this process, or None before `setup`."""
    return _compile


def facts() -> dict[str, Any]:
    """Device, BLAS and compile state, JSON-able; null before `setup`."""
    return {"device": device(), "blas": blas.to_json(), "compile": compile_on()}
