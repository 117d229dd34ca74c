"""An MTP head in a folder of its own, for a trunk that was published without one.

    HEAD/config.json         the head's own shape in MiMo's keys, and under "mtplab_head" the trunk it belongs to
    HEAD/model.safetensors   model.mtp_layers.0.*, MiMo's names

It is given beside the trunk (`--head HEAD`), or lies in the trunk's folder as `mtp_head/`, where other programs do not
look. Everything else is as with any head: it is read strictly, by name, through the row of its family.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtplab.errors import ModelError
from mtplab.models import configs, footprint, headers, headspec, mlxlm

INSIDE = "mtp_head"  # a head folder inside a checkpoint folder
ABOUT = "mtplab_head"


@dataclass(frozen=True, slots=True)
class HeadSource:
    """Where a head's tensors, config and shape come from; `args` None means the trunk's own."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, headers.TensorInfo]
    args: Any = None

    @property
    def own(self) -> bool:
        """Whether the head is part of the checkpoint itself."""
        return self.args is None


def find(folder: Path, config: dict, tensors: dict, head_folder: str | Path | None, *, wanted: bool) -> HeadSource:
    """The head asked for, else the one inside the checkpoint's folder, else the checkpoint's own."""
    if wanted and head_folder is not None:
        return read(Path(head_folder).expanduser(), config)
    place = inside(folder, config, tensors) if wanted else None
    return HeadSource(folder, config, tensors) if place is None else read(place, config)


def inside(folder: Path, config: dict, tensors: dict) -> Path | None:
    """The head folder inside a checkpoint's, or None. ModelError where the checkpoint holds a head itself, too."""
    place, spec = folder / INSIDE, headspec.find_spec(config)
    if not (place / "config.json").is_file():
        return None
    if spec is not None and (names := headspec.head_names(spec, tensors)):
        raise ModelError(f"{folder} holds two heads, {names[0]} and the rest, and {INSIDE}/; name one with --head")
    return place


def read(folder: Path, trunk: dict[str, Any]) -> HeadSource:
    """A head folder, checked against the trunk's config. Raises ModelError."""
    config, tensors = listed(folder, trunk)
    try:
        args = mlxlm.classes(config)[1].from_dict(config)
    except Exception as error:  # mlx-lm's code on somebody's config: anything may come
        why = " ".join(str(error).split())[:200]
        raise ModelError(f"{folder}/config.json does not describe a head: {why}") from error
    return HeadSource(folder, config, tensors, args)


def listed(folder: Path, trunk: dict[str, Any]) -> tuple[dict[str, Any], dict[str, headers.TensorInfo]]:
    """(config, tensors) of a head folder, checked as far as that goes without mlx. Raises ModelError."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json, so it is no head folder; `mtplab head train` makes one")
    config, tensors = headers.read_json(folder / "config.json"), headers.read_headers(folder)
    if headspec.find_spec(config) is None:
        raise ModelError(f"{folder} holds a {config.get('model_type')!r}, which is no family with an MTP head")
    extra = sorted(set(tensors) - set(headspec.head_names(headspec.find_spec(config), tensors)))
    if extra:
        raise ModelError(f"{folder} holds {extra[0]}, which is no head tensor; a head folder holds the head alone")
    configs.check(config, f"{folder}/config.json")
    _check_trunk(folder, config, trunk)
    _check_shape(folder, config)
    return config, tensors


SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def _check_shape(folder: Path, config: dict[str, Any]) -> None:
    for key in SHAPE:
        value = config.get(key)
        if type(value) is not int or not 1 <= value < 1 << 24:
            raise ModelError(
                f"{folder}/config.json has {key} = {configs.shown(value)}; it must be a whole number of at least 1"
            )
    dim, heads, kv = (config[k] for k in (SHAPE[0], SHAPE[2], SHAPE[3]))
    if dim % heads or heads % kv:
        raise ModelError(f"{folder}/config.json: {heads} heads cannot share a width of {dim} and {kv} key-value heads")


def _check_trunk(folder: Path, config: dict[str, Any], trunk: dict[str, Any]) -> None:
    """A head of the right width on the wrong trunk would load and accept next to nothing."""
    about = {} if config.get(ABOUT) is None else config[ABOUT]
    made_for = about.get("trunk") if isinstance(about, dict) else about
    if made_for is None:
        return
    if not isinstance(made_for, dict):
        key = f"{ABOUT}.trunk" if isinstance(about, dict) else ABOUT
        raise ModelError(f"{folder}/config.json has {key} = {configs.shown(made_for)}; it must be an object")
    for name, wanted in made_for.items():
        found = identity(trunk).get(name)
        if found != wanted:
            raise ModelError(
                f"the head in {folder} was made for a trunk with {name} {configs.shown(wanted)}, and this one has "
                f"{configs.shown(found)}"
            )


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """What a trunk's config says of its make; equal for every quantization of it."""
    text = footprint.text_config(config)
    names = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    return {n: config.get(n) if n == "model_type" else text.get(n) for n in names}
