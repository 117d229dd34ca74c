"""Checkpoints as conversion tools write them: MLX's names, stacked experts, shifted norms, quantized or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import tiny
from mlx.utils import tree_flatten

from mtplab.models import heads

KINDS: dict[str, dict[str, Any] | None] = {
    "float": None,
    "affine4": {"group_size": 64, "bits": 4, "mode": "affine"},
    "affine8": {"group_size": 32, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}


def convert(
    loaded: Any,
    folder: Path,
    trunk: dict | None = None,
    head: dict | str | None = "as trunk",
    *,
    unpack: bool = False,
    entries: str = "",
    default: dict | None = None,
) -> Path:
    """Write a loaded model as an export. `trunk`, `head`: quantization kinds; `unpack`: the rounded weights as
    floats; `entries`: a prefix that the per-module entries of the config get; `default`: the config's global kind."""
    head = trunk if head == "as trunk" else head
    config = json.loads((loaded.folder / "config.json").read_text())
    quantizable = {n for n, m in loaded.target.model.named_modules() if hasattr(m, "to_quantized")}
    weights = dict(tree_flatten(loaded.target.model.parameters()))
    out, table = {}, {}
    _store(out, table, weights, quantizable, trunk, unpack)
    if loaded.head is not None:
        values = dict(tree_flatten(loaded.head.parameters()))
        prefix = heads.choose_prefix(loaded.head.spec, set(loaded.head.file_names.values()))
        names = heads.expected_names(loaded.head.spec, loaded.head, prefix)
        modules = {n for n, m in loaded.head.named_modules() if hasattr(m, "to_quantized")}
        stems = {name.rsplit(".", 1)[0] for name, path in names.items() if path.rsplit(".", 1)[0] in modules}
        _store(out, table, {n: values[p] for n, p in names.items()}, stems, head, unpack)
    if table and not unpack:
        config["quantization"] = dict(default or trunk or head) | {entries + k: v for k, v in table.items()}
    tiny.write(folder, config, out)
    return folder


def _store(out: dict, table: dict, weights: dict, stems: set[str], kind: dict | None, unpack: bool) -> None:
    for name, a in weights.items():
        stem = name.removesuffix(".weight")
        fits = kind is not None and stem in stems and name != stem and a.shape[-1] % kind["group_size"] == 0
        if not fits:
            out[name] = a
            continue
        parts = mx.quantize(a, **kind)
        if unpack:
            out[name] = mx.dequantize(*parts, **kind, dtype=mx.float32)
            continue
        out |= {f"{stem}.{s}": x for s, x in zip(("weight", "scales", "biases"), parts, strict=False)}
        table[stem] = dict(kind)
