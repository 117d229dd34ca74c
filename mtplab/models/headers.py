"""Safetensors headers, read and checked before any byte of a weight is touched.

A checkpoint is untrusted input: a header that lies about its length, an offset past the end of the file, a
shape that does not fit its bytes or a name that occurs twice is refused with the file and the tensor named.
Only JSON and integers are read, so a 300 GB checkpoint is listed in milliseconds.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtplab.errors import ModelError

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its header describes it."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [k for k, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError(f"key {next(k for k in keys if keys.count(k) > 1)!r} occurs twice")
    return dict(pairs)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of one safetensors file; raises ModelError where the header lies."""
    size = path.stat().st_size
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > MAX_HEADER or 8 + length > size:
            raise ModelError(
                f"{path.name} is not a whole safetensors file ({size} bytes, header of {length}); download it again"
            )
        try:
            header = json.loads(f.read(length).decode("utf-8"), object_pairs_hook=_once)
            entries = {k: v for k, v in header.items() if k != "__metadata__"}
        except (ValueError, AttributeError, RecursionError) as error:
            raise ModelError(f"{path.name} has a broken safetensors header: {error}") from error
    data = size - 8 - length
    infos = {name: _info(path.name, name, entry, data) for name, entry in entries.items()}
    _no_overlap(path.name, entries)
    return infos


def _info(file: str, name: str, entry: Any, data: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers_ok = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    except (KeyError, TypeError, ValueError, OverflowError, MemoryError) as error:
        raise ModelError(f"{file}: tensor {name!r} has a malformed header entry") from error
    if not numbers_ok or len(shape) > 8:
        raise ModelError(f"{file}: tensor {name!r} has a shape or offsets that are no small list of whole numbers")
    if end - begin != nbytes:
        raise ModelError(f"{file}: tensor {name!r} claims {dtype} {_shape(shape)} but holds {end - begin} bytes")
    if end > data:
        raise ModelError(f"{file} is truncated: tensor {name!r} ends at byte {end} of {data}; download it again")
    return TensorInfo(name, file, dtype, shape, nbytes)


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(n) if n < 10**18 else "more than 10**18" for n in shape) + "]"


def _no_overlap(file: str, entries: Mapping[str, Any]) -> None:
    spans = sorted((*e["data_offsets"], n) for n, e in entries.items() if e["data_offsets"][1] > e["data_offsets"][0])
    for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
        if begin < end:
            raise ModelError(f"{file}: tensors {first!r} and {second!r} share bytes")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint file, or a ModelError that names the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds {type(data).__name__}, not an object")
    return data


def list_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint; an index may only name plain files inside the folder."""
    files = sorted(p for p in folder.glob("*.safetensors") if p.is_file())
    indexed = False
    for index in sorted(folder.glob("*.safetensors.index.json")):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index.name} has no weight_map object")
        for name in {str(v) for v in weight_map.values()}:
            if Path(name).name != name or name in ("", ".", ".."):
                raise ModelError(f"{index.name} points outside its folder: {name!r}")
            if not (folder / name).is_file():
                raise ModelError(f"{index.name} names {name!r}, which is missing from {folder}; download it again")
            indexed = True
    if indexed:
        # A second set of the same weights, in another vendor's names, that some repositories ship beside the first.
        files = [p for p in files if not p.name.startswith("consolidated")]
    if not files:
        raise ModelError(f"{folder} holds no .safetensors file")
    return files


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint folder by name."""
    tensors: dict[str, TensorInfo] = {}
    for path in list_files(folder):
        for name, info in read_header(path).items():
            if name in tensors:
                raise ModelError(f"tensor {name!r} is in both {tensors[name].file} and {info.file}")
            tensors[name] = info
    return tensors
