"""Which tensors of a canvas checkpoint are the text model, which are left out, and which nobody knows.

Pure functions of names, so that `inspect` sorts a checkpoint as the loader does and reads no weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

FAMILIES = ("diffusion_gemma", "llada2_moe")
VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
_DECODER, _ENCODER = "model.decoder.", "model.encoder.language_model."
_FUSED = re.compile(r"(\.experts\.(?:gate_up_proj|down_proj))$")
_ONE_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Sorted:
    """`text`: our parameter path -> its file name, or names to stack. `copies`: file name -> the path it repeats."""

    text: dict[str, tuple[str, ...]]
    copies: dict[str, str]
    vision: tuple[str, ...]


def is_canvas(model_type: object) -> bool:
    """Whether a config's model_type is a canvas model."""
    return model_type in FAMILIES


def sort_names(model_type: str, names: Iterable[str]) -> Sorted:
    """The tensors of a checkpoint by what becomes of them; rotary tables, which are computed, are dropped."""
    text: dict[str, tuple[str, ...]] = {}
    copies, vision = {}, []
    for name in sorted(names, key=_with_numbers):
        if name.startswith(VISION) and model_type == "diffusion_gemma":
            vision.append(name)
        elif "rotary_emb" in name:
            continue
        elif (original := _copied(model_type, name)) is not None:
            copies[name] = original
        else:
            path = parameter_path(model_type, name)
            text[path] = (*text.get(path, ()), name)
    return Sorted(text, copies, tuple(vision))


def _with_numbers(name: str) -> list[tuple[int, str]]:
    """Sort key under which expert 10 follows expert 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def parameter_path(model_type: str, name: str) -> str:
    """Our path of a tensor. Several names with one path are the experts of a layer, in order."""
    if model_type == "diffusion_gemma":
        # Fused experts are published without `.weight`; conversions add it.
        return _FUSED.sub(r"\1.weight", name)
    path = name.removeprefix("language_model.").replace(".mlp.switch_mlp.", ".mlp.experts.")
    return _ONE_EXPERT.sub(r"\1.\3", path)


def _copied(model_type: str, name: str) -> str | None:
    """The path of which a tied tensor is a second copy. Only `layer_scalar` is the encoder's own."""
    if model_type != "diffusion_gemma":
        return None
    if name.startswith("lm_head."):
        return _DECODER + "embed_tokens." + name.removeprefix("lm_head.")
    if name.startswith(_ENCODER) and not name.endswith(".layer_scalar"):
        return _FUSED.sub(r"\1.weight", _DECODER + name.removeprefix(_ENCODER))
    return None
