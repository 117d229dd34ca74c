"""GGUF files, read with bounds checked: metadata, tensors, and the block formats that turn into floats without a loss.

A GGUF file is untrusted input: every length, count, offset and shape is checked against the bytes that are there
before anything is allocated for it. Layout (version 2 and 3, little endian): magic, version, counts, key-value pairs,
tensor entries with shapes fastest dimension first, then the data at offsets from an aligned start.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtplab.errors import ModelError
from mtplab.models.configs import shown

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
BLOCK = 32  # weights of a quantized block


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to store weights: `block` of them in `size` bytes."""

    name: str
    block: int
    size: int


KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", BLOCK, 18),
    3: Kind("Q4_1", BLOCK, 20),
    8: Kind("Q8_0", BLOCK, 34),
    30: Kind("BF16", 1, 2),
}
NAMES = ", ".join(k.name for k in KINDS.values())


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry; `shape` as numpy has it (rows first)."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    data: memoryview

    def floats(self) -> np.ndarray:
        """float32 [shape], exactly what the blocks mean."""
        return DECODERS[self.kind.name](self)

    def packed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int] | None:
        """Of an affine kind (weight = scale * code + bias), else None: codes uint8 [rows, columns], scales and biases
        float32 [rows, columns / 32], bits."""
        return AFFINE[self.kind.name](self) if self.kind.name in AFFINE else None


def wrong(key: str, value: Any, must: str) -> ModelError:
    """The error of metadata of another type or size than they must have."""
    return ModelError(f"the GGUF file has {key} = {shown(value)}; it must be {must}")


class _Reader:
    """A cursor that cannot leave its file."""

    def __init__(self, name: str, data: memoryview):
        self.name, self.data, self.at = name, data, 0

    def take(self, count: int) -> memoryview:
        if count < 0 or self.at + count > len(self.data):
            raise ModelError(f"{self.name} is truncated or damaged at byte {self.at}; download it again")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        raw = bytes(self.take(self.number("Q")))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{self.name} has a string before byte {self.at} that is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY or depth > 4:
            raise ModelError(f"{self.name} has a value of the unknown type {kind} at byte {self.at}")
        inner, count = self.number("I"), self.number("Q")
        if inner in SCALARS:
            size = struct.calcsize("<" + SCALARS[inner])
            return np.frombuffer(self.take(count * size), "<" + _numpy(SCALARS[inner])).tolist()
        self._plausible(count, 8)
        return [self.value(inner, depth + 1) for _ in range(count)]

    def _plausible(self, count: int, least: int) -> int:
        """So many entries of at least `least` bytes must fit into what is left."""
        if count * least > len(self.data) - self.at:
            raise ModelError(f"{self.name} claims {count} entries at byte {self.at}, more than it can hold")
        return count

    def count(self, least: int) -> int:
        return self._plausible(self.number("Q"), least)


def _numpy(code: str) -> str:
    return {"B": "u1", "b": "i1", "H": "u2", "h": "i2", "I": "u4", "i": "i4", "f": "f4", "?": "?", "Q": "u8",
            "q": "i8", "d": "f8"}[code]  # fmt: skip


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(metadata, tensors by name) of a file; the data stays on disk until it is used. Raises ModelError."""
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    reader = _Reader(path.name, data)
    magic = bytes(data[:4])
    if magic != b"GGUF":
        raise ModelError(f"{path.name} is no GGUF file: it begins with {magic!r}")
    reader.take(4)
    version = reader.number("I")
    if version not in (2, 3):
        raise ModelError(f"{path.name} is GGUF of version {version}; versions 2 and 3 can be read")
    tensors, pairs = reader.number("Q"), reader.number("Q")
    reader._plausible(tensors, 24), reader._plausible(pairs, 13)
    meta: dict[str, Any] = {}
    for _ in range(pairs):
        name = reader.string()
        meta[name] = reader.value(reader.number("I"))
    entries = [_entry(reader) for _ in range(tensors)]
    return meta, _tensors(reader, meta, entries)


def _entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name, dims = reader.string(), reader.number("I")
    if not 1 <= dims <= 4:
        raise ModelError(f"{reader.name}: tensor {name!r} claims {dims} dimensions")
    shape = tuple(reader.number("Q") for _ in range(dims))[::-1]
    return name, shape, reader.number("I"), reader.number("Q")


def _tensors(reader: _Reader, meta: dict[str, Any], entries: list) -> dict[str, Tensor]:
    align = meta.get("general.alignment", 32)
    if not isinstance(align, int) or not 1 <= align <= 1 << 20:
        raise ModelError(f"{reader.name} has the impossible alignment {align!r}")
    start, out = -(-reader.at // align) * align, {}
    for name, shape, code, offset in entries:
        kind = KINDS.get(code)
        if kind is None:
            raise ModelError(f"{reader.name}: tensor {name!r} is of type {code}, which is none of {NAMES}")
        if name in out:
            raise ModelError(f"{reader.name} holds the tensor {name!r} twice")
        if shape[-1] % kind.block:
            raise ModelError(f"{reader.name}: tensor {name!r} has rows of {shape[-1]}, no multiple of {kind.block}")
        reader.at = start + offset
        out[name] = Tensor(name, shape, kind, reader.take(math.prod(shape) // kind.block * kind.size))
    return out


def _blocks(t: Tensor) -> np.ndarray:
    """uint8 [blocks, bytes]."""
    return np.frombuffer(t.data, np.uint8).reshape(-1, t.kind.size)


def _half(raw: np.ndarray) -> np.ndarray:
    """Two bytes of every block as float32 [blocks]."""
    return np.ascontiguousarray(raw).view("<f2")[:, 0].astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """[blocks, 16] bytes -> [blocks, 32] codes: the low halves first, then the high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=1)


def _rows(t: Tensor, codes: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> tuple:
    per_row = t.shape[-1] // BLOCK
    return codes.reshape(-1, t.shape[-1]), scales.reshape(-1, per_row), biases.reshape(-1, per_row), bits


def _q4_0(t: Tensor) -> tuple:
    b = _blocks(t)
    d = _half(b[:, :2])
    return _rows(t, _nibbles(b[:, 2:]), d, -8 * d, 4)


def _q4_1(t: Tensor) -> tuple:
    b = _blocks(t)
    return _rows(t, _nibbles(b[:, 4:]), _half(b[:, :2]), _half(b[:, 2:4]), 4)


def _q8_0(t: Tensor) -> tuple:
    b = _blocks(t)
    d = _half(b[:, :2])
    return _rows(t, b[:, 2:] ^ 128, d, -128 * d, 8)  # signed bytes plus 128


AFFINE: dict[str, Callable[[Tensor], tuple]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}


def _affine_floats(t: Tensor) -> np.ndarray:
    codes, scales, biases, _ = t.packed()
    blocks = codes.reshape(*scales.shape, BLOCK).astype(np.float32)
    return (blocks * scales[..., None] + biases[..., None]).reshape(t.shape)


def _bf16(t: Tensor) -> np.ndarray:
    return (np.frombuffer(t.data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(t.shape)


DECODERS: dict[str, Callable[[Tensor], np.ndarray]] = {
    "F32": lambda t: np.frombuffer(t.data, "<f4").reshape(t.shape),
    "F16": lambda t: np.frombuffer(t.data, "<f2").astype(np.float32).reshape(t.shape),
    "BF16": _bf16,
    **dict.fromkeys(AFFINE, _affine_floats),
}
