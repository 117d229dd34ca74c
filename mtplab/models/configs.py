"""A config.json is untrusted input: what it says of sizes, checked before a module is built from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mtplab.errors import ModelError
from mtplab.models.mlxlm import DIRECT

MAX_SIZE = 1 << 24  # of a dimension, a vocabulary, a number of experts
# Keys that all families share, with the least whole number each may be. Only the families of DIRECT are known to take
# neither null nor a list by layer.
WHOLE = {
    "hidden_size": 1, "vocab_size": 1, "max_position_embeddings": 1, "intermediate_size": 0, "num_attention_heads": 0,
    "num_key_value_heads": 0, "head_dim": 0, "backbone_hidden_size": 1, "num_centroids": 1, "sliding_window": 0,
    "centroid_intermediate_top_k": 1,
}  # fmt: skip
POSITIVE = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")  # the last is a share
NEVER_NULL = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "rms_norm_eps", "rope_theta")
SIZES = ("_size", "_dim", "_rank", "_heads", "_experts", "_layers")
OBJECTS = ("text_config", "rope_parameters", "rope_scaling")


def shown(value: Any) -> str:
    """A value in a sentence, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about the text model, where the config has one; empty for none."""
    return config["text_config"] if isinstance(config.get("text_config"), dict) else {}


def check(config: Mapping[str, Any], file: str = "config.json") -> None:
    """Every key that all families share is of its type, absent, or null where it may be. ModelError names file, key
    and value."""
    kind = config.get("model_type")
    if not isinstance(kind, str | None):
        raise ModelError(f"{file} has model_type {shown(kind)}; it must name an architecture of mlx-lm")
    ropes = (config.get("rope_parameters"), text_of(config).get("rope_parameters"))
    for source in (config, text_of(config), *(r for r in ropes if isinstance(r, dict))):
        for key, value in source.items():
            if value is None:
                elsewhere = key == "rope_theta" and isinstance(source.get("rope_parameters"), dict)
                if key not in NEVER_NULL or kind not in DIRECT or elsewhere:
                    continue
            if key in OBJECTS and not isinstance(value, dict):
                raise ModelError(f"{file} has {key} = {shown(value)}; it must be an object")
            parts = value if isinstance(value, list) and value and kind not in DIRECT else [value]
            if key in WHOLE and not all(whole(p, WHOLE[key]) for p in parts):
                raise ModelError(
                    f"{file} has {key} = {shown(value)}; it must be a whole number of at least {WHOLE[key]}"
                )
            if key in POSITIVE and not all(positive(p) for p in parts):
                raise ModelError(f"{file} has {key} = {shown(value)}; it must be a number above 0")
            if key == "partial_rotary_factor" and max(parts) > 1:
                raise ModelError(f"{file} has {key} = {shown(value)}; it must be at most 1")


def whole(value: Any, least: int) -> bool:
    """A whole number of at least `least`; True is none."""
    return type(value) is int and value >= least


def positive(value: Any) -> bool:
    """A finite number above 0."""
    return type(value) in (int, float) and 0 < value < math.inf


def check_sizes(config: Mapping[str, Any], tensors: Mapping[str, Any], file: str = "config.json") -> None:
    """`check`, and against the files: a config may claim any size, and what they cannot hold is refused."""
    check(config, file)
    for source in (config, text_of(config)):
        for key, value in source.items():
            if key == "num_hidden_layers" and not (whole(value, 1) and value <= len(tensors)):
                raise ModelError(f"{file} has {key} = {shown(value)}, but the files hold {len(tensors)} tensors")
            sized = key.endswith(SIZES)
            if sized and isinstance(value, str) and not key.endswith("_layers"):
                raise ModelError(f"{file} has {key} = {shown(value)}; it must be a number")
            if sized and isinstance(value, (int, float)) and value > MAX_SIZE:
                raise ModelError(f"{file} has {key} = {shown(value)}, which no tensor of the files has")
