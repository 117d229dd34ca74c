"""How a linear is stored: affine, mxfp4, mxfp8, nvfp4 or not quantized. The config's word is checked on the tensors.

Affine stores weight, scales and biases; the float formats have uint8 scales and no biases, and each allows one group
size. A module's own entry in config.json may stand under any path prefix. Bits and group follow from the shapes
once the width of the input is known, so nothing is guessed; a config that says otherwise is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtplab.errors import ModelError

FLOAT_MODES = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (16, 32, 64, 128)


def table(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization object of a config, wherever it stands; empty for none."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    for source in (config, text):
        for key in ("quantization", "quantization_config"):
            if source.get(key) is not None:
                if not isinstance(source[key], dict):
                    raise ModelError(f"config.json has {key} = {source[key]!r}; it must be an object")
                return source[key]
    return {}


def bare(path: str) -> str:
    """A module path without the prefixes that conversions put before it or take away."""
    parts = path.split(".")
    while parts and parts[0] in ("model", "language_model", "backbone"):
        parts = parts[1:]
    return ".".join(parts)


def own_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The per-module entries of a config by bare path."""
    return {bare(k): v for k, v in table(config).items() if isinstance(v, (dict, bool))}


def shapes_fit(packed: int, scales: int, bits: int, group: int) -> bool:
    """Do `packed` uint32 columns and `scales` groups describe the same width?"""
    return packed * 32 == scales * group * bits


def found_kind(stem: str, packed: int, scales: int, float_scales: bool, in_dims: int) -> dict[str, Any]:
    """{"group_size", "bits", "mode"} from the tensors' last dimensions and the width of the module's input."""
    bits, group = packed * 32 // in_dims, in_dims // max(scales, 1)
    fits = bits * in_dims == packed * 32 and group * scales == in_dims
    mode = "affine" if float_scales else FLOAT_MODES.get((bits, group))
    if not fits or mode is None or (mode == "affine" and (bits not in AFFINE_BITS or group not in GROUPS)):
        raise ModelError(
            f"{stem} has {packed} packed columns and {scales} scales for an input of {in_dims}: no quantization "
            f"that mlx knows has {bits} bits in groups of {group}"
        )
    return {"group_size": group, "bits": bits, "mode": mode}


def stored_kind(stem: str, in_dims: int, weights: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of a stored linear (`weights`: arrays by name), checked against the config's word on it."""
    packed, scales = weights[f"{stem}.weight"], weights[f"{stem}.scales"]
    found = found_kind(stem, packed.shape[-1], scales.shape[-1], not str(scales.dtype).endswith("uint8"), in_dims)
    check(stem, found, config)
    return found


def check(stem: str, found: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """The module's own entry in the config, where it has one, must say what the tensors say."""
    declared = own_entries(config).get(bare(stem))
    if declared is False:
        raise ModelError(f"{stem} is declared as not quantized in config.json but its tensors are {dict(found)}")
    if isinstance(declared, dict) and any(declared.get(k, v) != v for k, v in found.items()):
        raise ModelError(f"{stem} is declared as {declared} in config.json but its tensors are {dict(found)}")


def check_files(tensors: Mapping[str, Any], config: Mapping[str, Any], head: set[str]) -> None:
    """From headers alone: every packed module fits its own entry, and the default fits at least one trunk module.

    A default that fits some modules and not others is common (mixed bits) and harmless, as the shapes decide; one
    that fits none is a config of another checkpoint.
    """
    general, own = table(config), own_entries(config)
    default = (general.get("bits"), general.get("group_size"))
    misfit, fitting = None, 0
    for name in [n for n in tensors if n.endswith(".scales") and f"{n[:-7]}.weight" in tensors]:
        stem = name[:-7]
        weight, scales = tensors[f"{stem}.weight"], tensors[name]
        if weight.dtype != "U32" or not weight.shape or not scales.shape:
            continue
        columns = weight.shape[-1], scales.shape[-1]
        entry = own.get(bare(stem))
        if isinstance(entry, dict):
            if not _fits(entry, columns):
                raise ModelError(f"{stem} is declared as {entry} in config.json but its tensors do not fit that")
        elif name not in head and all(type(v) is int for v in default):
            fitting, misfit = (fitting + 1, misfit) if _fits(general, columns) else (fitting, stem)
    if misfit is not None and not fitting:
        raise ModelError(
            f"config.json declares quantization bits = {default[0]}, group_size = {default[1]}, "
            f"which fits no tensor of the files ({misfit} among them)"
        )


def _fits(entry: Mapping[str, Any], columns: tuple[int, int]) -> bool:
    bits, group = entry.get("bits"), entry.get("group_size")
    if type(bits) is not int or type(group) is not int:
        return True  # said elsewhere (a mode alone); the shapes are checked when the module is built
    return shapes_fit(*columns, bits, group)
