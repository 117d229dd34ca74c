"""Randomness by name instead of by order: what `key(seed, request, position, "residual")` gives never depends on
how much randomness anything else has used. The global generator of mlx is never touched.

Seed and parts are hashed with their types and lengths, so (1, 23) and (12, 3) and ("1", 23) are all different.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np


def _field(part: int | str) -> bytes:
    # bool is an int to Python; as a part it is a mistake that would hide as 0 or 1.
    if isinstance(part, bool) or not isinstance(part, int | str):
        raise TypeError(f"a key part must be an int or a str, not {part!r}")
    body = str(part).encode()
    return (b"i" if isinstance(part, int) else b"s") + len(body).to_bytes(8, "big") + body


def words(seed: int, *parts: int | str) -> tuple[int, int]:
    """Two 32-bit words, a pure function of seed and parts (BLAKE2b). Needs no mlx."""
    digest = hashlib.blake2b(b"".join(_field(p) for p in (seed, *parts)), digest_size=8, person=b"mtplab-key").digest()
    return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big")


def key(seed: int, *parts: int | str) -> mx.array:
    """An mlx random key, uint32 [2], for the named purpose: `key(seed, request, position, "residual")`."""
    import mlx.core as mx

    return mx.array(words(seed, *parts), dtype=mx.uint32)


def integers(below: int, count: int, seed: int, *parts: int | str) -> np.ndarray:
    """`count` integers in [0, below), int32, without asking the device (Philox; below 2**32)."""
    import numpy as np

    a, b = words(seed, *parts)
    raw = np.random.Philox(key=a << 32 | b).random_raw(count)
    return ((raw >> np.uint64(32)) * np.uint64(below) >> np.uint64(32)).astype(np.int32)


def uniforms(count: int, seed: int, *parts: int | str) -> np.ndarray:
    """`count` numbers above 0 and below 1, odd multiples of 2**-24 and so exact in float32, without the device."""
    import numpy as np

    # The middle of each of 2**23 equal parts: 0 itself would pick the first id, however unlikely that one is.
    return (integers(1 << 23, count, seed, *parts) * 2 + 1).astype(np.float32) / np.float32(1 << 24)


def uniform(seed: int, *parts: int | str) -> float:
    """One number in [0, 1), a multiple of 2**-24 and so exact in float32, without asking the device."""
    return (words(seed, *parts)[0] >> 8) / 2**24
