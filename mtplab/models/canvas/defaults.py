"""What a checkpoint says about how it wants to be decoded, by our names, with file and key of each value."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mtplab.errors import ModelError
from mtplab.models.headers import read_json

FILE = "generation_config.json"
# Our name -> (path of the key in generation_config.json, type, least allowed value).
KEYS: dict[str, tuple[tuple[str, ...], type, float]] = {
    "steps": (("max_denoising_steps",), int, 1),
    "t_min": (("t_min",), float, 0.0),
    "t_max": (("t_max",), float, 0.0),
    "entropy_bound": (("sampler_config", "entropy_bound"), float, 0.0),
    "stability_threshold": (("stability_threshold",), int, 0),
    "confidence_threshold": (("confidence_threshold",), float, 0.0),
    "max_tokens": (("max_new_tokens",), int, 1),
}
KNOWN = "EntropyBoundSamplerConfig"  # the one sampler that is published; values of another mean something else
POSITIVE = ("t_max", "confidence_threshold")  # above their least value, too


def read_defaults(folder: Path, config: dict[str, Any], canvas: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and sources, only of what the checkpoint says. Raises ModelError for a value of the wrong kind."""
    key = "canvas_length" if config.get("canvas_length") else "block_length"
    values: dict[str, Any] = {"canvas": canvas}
    sources = {"canvas": f"config.json: {key}" if config.get(key) else "the architecture"}
    path = folder / FILE
    generation = read_json(path) if path.is_file() else {}
    sampler = generation.get("sampler_config")
    wanted = sampler.get("_cls_name") if isinstance(sampler, dict) else None
    if wanted not in (None, KNOWN):
        values["sampler_class"], sources["sampler_class"] = str(wanted), f"{FILE}: sampler_config._cls_name"
        generation = {k: v for k, v in generation.items() if k != "sampler_config"}
    for name, (route, kind, least) in KEYS.items():
        value: Any = generation
        for part in route:
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            continue
        # bool is an int to Python, and here a mistake.
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or kind(value) != value or value < least or (value == 0 and name in POSITIVE):
            noun, bound = "whole number" if kind is int else "number", "above" if name in POSITIVE else "of at least"
            raise ModelError(f"{FILE} has {'.'.join(route)} = {value!r}; it must be a {noun} {bound} {least:g}")
        values[name], sources[name] = kind(value), f"{FILE}: {'.'.join(route)}"
    if values.get("t_min", 0.0) > values.get("t_max", math.inf):
        raise ModelError(f"{FILE} has t_min {values['t_min']} above t_max {values['t_max']}")
    return values, sources
