"""MTP head families as a table: what a head's tensors are called and how its parts are wired.

One module (`heads.Head`) runs every row of this table; a family is a row, not a file. Facts are read from public
checkpoints' layouts and at least two independent implementations each; where public codes disagree the field is
an option of `load_target` and the value here is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mtplab.errors import RequestError


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """One family. Tensor names are templates: {p} is a prefix, {i} the head layer."""

    family: str
    model_types: tuple[str, ...]
    prefixes: tuple[str, ...]  # where the head's tensors may live, first match wins
    marks: tuple[str, ...]  # substrings that make a tensor a head tensor (nothing of them may be left over)
    embed_norm: str
    hidden_norm: str
    proj: str
    block: str
    final_norm: str
    fusion: str  # "eh" concat(embedding, hidden), "he" concat(hidden, embedding)
    hidden: str  # which trunk hidden it takes: "post" or "pre" the final norm
    recursion: str  # what the next depth gets: "final" (after final_norm) or "block" (before it)
    count_keys: tuple[str, ...]  # config keys that hold the number of head layers
    zero_centred: bool  # raw checkpoints store norm weights minus one
    block_layer: Callable[[Any], Any]  # model args -> a decoder layer of the trunk's own class

    def effective(self) -> dict[str, Any]:
        """The row as it was used, for the record."""
        out = asdict(self)
        out.pop("block_layer")
        return {k: list(v) if isinstance(v, tuple) else v for k, v in out.items()}


def _mimo_block(args: Any) -> Any:
    from mlx_lm.models.mimo import TransformerBlock

    return TransformerBlock(args)


def _qwen3_5_block(args: Any) -> Any:
    from mlx_lm.models.qwen3_5 import DecoderLayer

    # The head's layer is a full-attention one: the index of the trunk's first full-attention layer.
    return DecoderLayer(args, args.full_attention_interval - 1)


SPECS: tuple[HeadSpec, ...] = (
    HeadSpec(
        family="mimo",
        model_types=("mimo",),
        prefixes=("model.",),
        marks=("mtp_layers.",),
        embed_norm="{p}mtp_layers.{i}.token_layernorm",
        hidden_norm="{p}mtp_layers.{i}.hidden_layernorm",
        proj="{p}mtp_layers.{i}.input_proj",
        block="{p}mtp_layers.{i}",
        final_norm="{p}mtp_layers.{i}.final_layernorm",
        fusion="he",
        hidden="post",
        recursion="final",
        count_keys=("num_nextn_predict_layers",),
        zero_centred=False,
        block_layer=_mimo_block,
    ),
    HeadSpec(
        family="qwen3_5",
        model_types=("qwen3_5", "qwen3_5_text"),
        prefixes=("", "language_model.", "model.", "model.language_model.", "language_model.model."),
        marks=("mtp.",),
        embed_norm="{p}mtp.pre_fc_norm_embedding",
        hidden_norm="{p}mtp.pre_fc_norm_hidden",
        proj="{p}mtp.fc",
        block="{p}mtp.layers.{i}",
        final_norm="{p}mtp.norm",
        fusion="eh",
        hidden="post",
        recursion="final",
        count_keys=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
        zero_centred=True,
        block_layer=_qwen3_5_block,
    ),
)


def find_spec(config: Mapping[str, Any]) -> HeadSpec | None:
    """The row for a checkpoint's model_type, or None if the family has no MTP head known here."""
    kinds = {config.get("model_type"), (config.get("text_config") or {}).get("model_type")}
    return next((s for s in SPECS if kinds & set(s.model_types)), None)


def with_options(spec: HeadSpec, recursion: str | None, hidden: str | None) -> HeadSpec:
    """The row with the options where public codes differ; an unknown value is an error that lists the known."""
    for name, value, known in (("recursion", recursion, ("final", "block")), ("hidden", hidden, ("post", "pre"))):
        if value is not None and value not in known:
            raise RequestError(f"{name} {value!r} is not one of {', '.join(known)}")
    return replace(spec, recursion=recursion or spec.recursion, hidden=hidden or spec.hidden)


def declared_layers(spec: HeadSpec, config: Mapping[str, Any]) -> int | None:
    """How many head layers the config declares, or None if it says nothing."""
    for source in (config, config.get("text_config") or {}):
        for key in spec.count_keys:
            if isinstance(source.get(key), int):
                return source[key]
    return None


def head_names(spec: HeadSpec, names: Any) -> list[str]:
    """The names among `names` that belong to the head."""
    return [n for n in names if any(f".{m}" in f".{n}" for m in spec.marks)]
