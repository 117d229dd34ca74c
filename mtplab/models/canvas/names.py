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


@dataclass(frozen=True)
class Sorted:
    """`text`: our parameter path -> file name. `copies`: file name -> the path that it repeats."""

    text: dict[str, str]
    copies: dict[str, str]
    vision: tuple[str, ...]


def is_canvas(model_type: object) -> bool:
    """Whether a config's model_type is a canvas model."""
    return model_type in FAMILIES


def sort_names(model_type: str, names: Iterable[str]) -> Sorted:
    """The tensors of a checkpoint by what becomes of them; rotary tables, which are computed, are dropped."""
    text, copies, vision = {}, {}, []
    for name in sorted(names):
        if name.startswith(VISION) and model_type == "diffusion_gemma":
            vision.append(name)
        elif "rotary_emb" in name:
            continue
        elif (original := _copied(model_type, name)) is not None:
            copies[name] = original
        else:
            # Fused experts are published without `.weight`; conversions add it.
            text[_FUSED.sub(r"\1.weight", name)] = name
    return Sorted(text, copies, tuple(vision))


def _copied(model_type: str, name: str) -> str | None:
    """The path of which a tied tensor is a second copy. Only `layer_scalar` is the encoder's own."""
    if model_type != "diffusion_gemma":
        return None
    if name.startswith("lm_head."):
        return _DECODER + "embed_tokens." + name.removeprefix("lm_head.")
    if name.startswith(_ENCODER) and not name.endswith(".layer_scalar"):
        return _FUSED.sub(r"\1.weight", _DECODER + name.removeprefix(_ENCODER))
    return None
