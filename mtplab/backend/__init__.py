"""Which device and BLAS, clocks and fences, keyed randomness, the state of the machine.

Importing this package imports no mlx. `setup()` chooses the BLAS, imports mlx and turns compile off on the CPU;
call it before anything that imports `mlx.core`, `mlx_lm` or `mtplab.kernels`' plain twins.
"""

from .blas import BlasInfo
from .clock import Clock, MonotonicClock, ScriptedClock, fence
from .keys import key, uniform
from .load import LoadSampler
from .machine import facts
from .runtime import compile_on, device, setup

__all__ = [
    "BlasInfo",
    "Clock",
    "LoadSampler",
    "MonotonicClock",
    "ScriptedClock",
    "compile_on",
    "device",
    "facts",
    "fence",
    "key",
    "setup",
    "uniform",
]
