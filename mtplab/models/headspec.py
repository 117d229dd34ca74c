"""What an MTP head family is: how its tensors are called and how its parts are wired.

One module (`heads.Head`) runs every family; a family is a row of `families.SPECS`, not a file. Facts are read from
public checkpoints' layouts and at least two independent implementations each; where public codes disagree the
field is an option of `load_target` and the value in the row is the default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mtplab.errors import ModelError, RequestError

COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
RAW_BELOW, SHIFTED_ABOVE = 0.4, 0.7  # mean of the head's norm weights; between them nobody can tell
PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """One family. Tensor names are templates: {p} is a prefix, {i} the head layer, {n} the layer's number when the
    head's layers are counted on from the trunk's, {first} and {last} the layer's first and last block where a layer
    is several blocks (`pattern`), {b} one of them."""

    family: str
    model_types: tuple[str, ...]
    prefixes: tuple[str, ...]  # where the head's tensors may live, first match wins
    marks: tuple[str, ...]  # substrings that make a tensor a head tensor; none: trunk layers beyond the last one
    embed_norm: str
    hidden_norm: str
    proj: str
    block: str
    final_norm: str
    # "eh" concat(embedding, hidden), "he" concat(hidden, embedding), "sum" each through a matrix of its own
    fusion: str
    hidden: str  # which trunk hidden it takes: "post" or "pre" the final norm
    recursion: str  # what the next depth gets: "final" (after final_norm) or "block" (before it)
    block_class: str  # module.Class of mlx_lm.models, or the full path of what makes the block
    block_index: str = "none"  # layer number the class is built with: "none", "full" attention, "next" after the trunk
    count_keys: tuple[str, ...] = COUNT_KEYS  # config keys that hold the number of head layers
    zero_centred: bool = False  # raw checkpoints store norm weights minus one
    streams: str | None = None  # config key: a hidden state is so many streams, the embedding goes into each
    embed_proj: str | None = None  # the embedding's matrix where the fusion is a sum; `proj` is then the hidden's
    unembed: str | None = None  # the head's own unembedding; where the file has none (or an equal one) the trunk's
    embed: str | None = None  # the head's own copy of the embedding; likewise
    pattern: str | None = None  # block types of one head layer, "*" attention, "E" MoE, "-" MLP
    trunk_layers: int = 0  # set by `find_spec` from the config

    def effective(self) -> dict[str, Any]:
        """The row as it was used, for the record."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def name(self, part: str, prefix: str, layer: int, block: int = 0) -> str:
        """The checkpoint's name of a part (a field of this row) of head layer `layer`."""
        width = len(self.pattern or "x")
        first = layer * width
        numbers = {"i": layer, "n": self.trunk_layers + layer, "first": first, "last": first + width - 1}
        return getattr(self, part).format(p=prefix, b=first + block, **numbers)


def find_spec(config: Mapping[str, Any]) -> HeadSpec | None:
    """The row for a checkpoint's model_type, bound to its config, or None if the family has no head known here."""
    from mtplab.models.families import SPECS

    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    kinds = {k for k in (config.get("model_type"), text.get("model_type")) if isinstance(k, str)}
    spec = next((s for s in SPECS if kinds & set(s.model_types)), None)
    return None if spec is None else _bind(spec, config, text)


def _bind(spec: HeadSpec, config: Mapping[str, Any], text: Mapping[str, Any]) -> HeadSpec:
    """The row with what only this checkpoint's config knows: the trunk's depth, the blocks of a head layer."""
    trunk = next((s["num_hidden_layers"] for s in (text, config) if isinstance(s.get("num_hidden_layers"), int)), 0)
    if spec.pattern is None:
        return replace(spec, trunk_layers=trunk)
    for value in (s.get(k) for s in (config, text) for k in ("hybrid_override_pattern", "layers_block_type")):
        trunk = trunk or (len(value) if isinstance(value, (str, list)) else 0)
    return replace(spec, trunk_layers=trunk, pattern=_pattern(config) or spec.pattern)


def _pattern(config: Mapping[str, Any]) -> str | None:
    value = config.get("mtp_hybrid_override_pattern")
    if value is None and isinstance(config.get("mtp_layers_block_type"), list):
        chars = {"full_attention": "*", "attention": "*", "moe": "E", "mlp": "-"}
        value = "".join(chars.get(t, "?") if isinstance(t, str) else "?" for t in config["mtp_layers_block_type"])
    if value is None:
        return None
    if not isinstance(value, str) or not value or set(value) - set("*E-"):
        raise ModelError(
            f"mtp_hybrid_override_pattern {value!r} has blocks that cannot be rolled back or are unknown; "
            "an MTP head of '*', 'E' and '-' blocks can be run"
        )
    return value


def with_options(spec: HeadSpec, recursion: str | None, hidden: str | None) -> HeadSpec:
    """The row with the options where public codes differ; an unknown value is an error that lists the known."""
    for name, value, known in (("recursion", recursion, ("final", "block")), ("hidden", hidden, ("post", "pre"))):
        if value is not None and value not in known:
            raise RequestError(f"{name} {value!r} is not one of {', '.join(known)}")
    return replace(spec, recursion=recursion or spec.recursion, hidden=hidden or spec.hidden)


def declared(spec: HeadSpec, config: Mapping[str, Any]) -> tuple[str, int] | None:
    """(key, number of head layers) as the config has it, or None if it says nothing."""
    text = config.get("text_config")
    for source in (config, text if isinstance(text, dict) else {}):
        for key in spec.count_keys:
            value = source.get(key)
            if value is not None:
                if type(value) is not int or not 0 <= value <= 64:
                    raise ModelError(f"config.json has {key} = {value!r}; it must be a number from 0 to 64")
                return key, value
    return None


def declared_layers(spec: HeadSpec, config: Mapping[str, Any]) -> int | None:
    """How many head layers the config declares, or None if it says nothing."""
    found = declared(spec, config)
    return None if found is None else found[1]


def head_names(spec: HeadSpec, names: Iterable[str]) -> list[str]:
    """The names among `names` that belong to the head."""
    if spec.marks:
        return [n for n in names if any(f".{m}" in f".{n}" for m in spec.marks)]
    return [n for n in names if (number := _number(spec, n)) is not None and number >= spec.trunk_layers]


def raw_layout(spec: HeadSpec, tensors: Mapping[str, Any]) -> bool:
    """Does the trunk's layout say that this is a raw checkpoint: convolutions channels first, experts under Step's
    own names? Its head's norms are then stored raw, too. `tensors`: name -> anything with a `shape`."""
    return any(
        (n.endswith("conv1d.weight") and t.shape and t.shape[-1] != 1) or (spec.family == "step3p5" and ".moe." in n)
        for n, t in tensors.items()
    )


def layer_of(spec: HeadSpec, name: str) -> int | None:
    """The head layer a head tensor's name speaks of."""
    if not spec.marks:
        number = _number(spec, name)
        return None if number is None else number - spec.trunk_layers
    found = re.search(r"layers\.(\d+)\.", name)
    return None if found is None else int(found[1]) // len(spec.pattern or "x")


def _number(spec: HeadSpec, name: str) -> int | None:
    """The trunk-style layer number of a name under one of the row's prefixes."""
    for p in spec.prefixes:
        if name.startswith(p + "layers."):
            number = name[len(p) + 7 :].split(".", 1)[0]
            return int(number) if number.isdecimal() and len(number) < 6 else None
    return None
