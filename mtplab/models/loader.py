"""A checkpoint folder -> a target, its MTP head, its tokenizer and the facts about all three.

Requested = effective, or an error: every option is either applied and recorded in `facts`, or refused with the
reason. Weights are read once; nothing of a checkpoint is executed (`trust_remote_code` is off unless asked).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mtplab.errors import ModelError, RequestError
from mtplab.models import configs, families, headers, headfile, headload, heads, headspec, kinds, mlxlm, vlm
from mtplab.models.assistant import Assistant, load_assistant
from mtplab.models.canvas.names import is_canvas
from mtplab.models.target import Target
from mtplab.models.tokenizer import Tokenizer

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
HEAD_MODES = ("auto", "none", "require")
NAN_CHECK_BYTES = 4 << 30  # larger checkpoints are caught at the first logits instead


@dataclass
class Loaded:
    """What `load_target` returns."""

    target: Target
    head: heads.Head | Assistant | None
    tokenizer: Tokenizer
    folder: Path
    context: int  # positions the model was declared for
    facts: dict[str, Any] = field(default_factory=dict)
    verifiers: dict[Any, Any] = field(default_factory=dict, repr=False)  # ways of verifying, opened once a model


def resolve(name: str | Path) -> Path:
    """A local folder, or a hub id fetched through huggingface_hub's cache."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"[\w.\-]+/[\w.\-]+", str(name)):
        raise ModelError(f"{str(name)!r} is neither a checkpoint folder nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]))
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{str(name)!r} is no local folder and could not be fetched from the hub: {reason}") from error


def load_target(
    name: str | Path,
    *,
    head: str = "auto",
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    max_kv_size: int | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    recursion: str | None = None,
    hidden: str | None = None,
    head_norms: str | None = None,
    assistant: str | Path | None = None,
    head_folder: str | Path | None = None,
) -> Loaded:
    """Load a checkpoint folder (or hub id) as a `Target` with its MTP head.

    `head`: "auto" (if the family has one and the config or the files mention it), "none", "require".
    `dtype`: float32, float16, bfloat16, or None: as stored on a GPU, float32 on the CPU.
    `recursion`, `hidden`, `head_norms`: override the family's row where public codes differ.
    `assistant`: folder or hub id of a Gemma 4 assistant, which then is the head.
    `head_folder`: a head in a folder of its own (`headfile`), instead of the checkpoint's.
    Raises ModelError (a file is wrong) or RequestError (an option cannot be honoured).
    """
    if head not in HEAD_MODES:
        raise RequestError(f"head {head!r} is not one of {', '.join(HEAD_MODES)}")
    folder = resolve(name)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json, so it is not a checkpoint folder")
    config, tensors = headers.read_json(folder / "config.json"), headers.read_headers(folder)
    if is_canvas(config.get("model_type")):
        raise ModelError(f"{folder} is a canvas model ({config['model_type']}); it decodes with `mtplab denoise`")
    if "model_file" in config and not trust_remote_code:
        raise ModelError(
            f"{folder} wants to run its own {config['model_file']!r}; pass --trust-remote-code to allow it"
        )
    if head_folder is not None and assistant is not None:
        raise RequestError("--head and --assistant are two drafters; give one of them")
    if head_norms not in (None, "raw", "shifted"):
        raise RequestError(f"head-norms {head_norms!r} is not one of raw, shifted")
    of_head = {"recursion": recursion, "hidden": hidden, "head-norms": head_norms}
    _refuse_unused(head, head_folder, assistant, of_head)
    configs.check_sizes(config, tensors)
    source = headfile.find(folder, config, tensors, head_folder, wanted=head != "none")
    quantized = any(n.endswith(".scales") for n in tensors)
    spec, cast = headspec.find_spec(config), choose_dtype(dtype)
    in_head = set(headspec.head_names(spec, tensors)) if spec is not None else set()
    kinds.check_files(tensors, config, in_head)
    model = build_trunk(folder, config, tensors, in_head, trust_remote_code)
    _cast(model, cast)
    spec = headspec.find_spec(source.config)
    if spec is not None:
        spec = headspec.with_options(spec, recursion, hidden)
    elif recursion or hidden:
        raise RequestError(f"recursion and hidden need an MTP head, and {config.get('model_type')!r} has none here")
    target = Target(
        model,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        max_kv_size=max_kv_size,
        hidden="post" if spec is None or (head == "none" and hidden is None) else spec.hidden,
    )
    unused = head == "none" or assistant is not None
    layers = 0 if unused else wanted_layers(spec, source.config, source.tensors, require=head == "require")
    if head_norms is not None:
        _check_norms(head_norms, spec if layers or head == "none" else None)
    module: heads.Head | Assistant | None = None
    if assistant is not None and head != "none":
        module = load_assistant(resolve(assistant), target)
        _cast(module, cast)
    elif spec is not None and layers:
        module = _read_head(spec, layers, source, target, head_norms)
        _cast(module, cast)
    elif given := [f"{k} {v!r}" for k, v in of_head.items() if v is not None]:
        raise RequestError(f"{given[0]} is for an MTP head, and {folder.name} has none; leave it out")
    for part in (model, module):
        # One tensor after the other: a stacked or split one then frees its sources before the next is read.
        for _, a in [] if part is None else tree_flatten(part.parameters()):
            mx.eval(a)
    if sum(t.nbytes for t in tensors.values()) <= NAN_CHECK_BYTES:
        _refuse_nan(model, module)
    if kv_bits is not None:
        _check_kv_bits(target, kv_bits, kv_group_size)
    facts = _facts(folder, config, target, module, quantized, cast)
    facts["head_folder"] = None if module is None or source.own else str(source.folder)
    facts |= {"kv_bits": kv_bits, "kv_group_size": kv_group_size if kv_bits else None, "max_kv_size": max_kv_size}
    return Loaded(target, module, Tokenizer(folder, config), folder, context_length(config), facts)


def _refuse_unused(
    head: str, folder: str | Path | None, assistant: str | Path | None, of_head: dict[str, str | None]
) -> None:
    """RequestError for what is asked of a head where none is to be loaded, or an assistant in its place."""
    given = [f"{k} {v!r}" for k, v in of_head.items() if v is not None]
    if head == "none":
        given += [f"the {k} in {v}" for k, v in (("head", folder), ("assistant", assistant)) if v is not None]
        if given:
            raise RequestError(f"{given[0]} was given but nothing that is to run needs one; leave it out")
    if assistant is not None and given:
        raise RequestError(f"{given[0]} is for an MTP head, and the assistant drafts instead; leave it out")


def _check_kv_bits(target: Target, bits: int, group: int) -> None:
    try:
        mx.eval(target.forward(mx.array([0]), target.new_cache()).logits)
    except ValueError as error:
        why = _one_line(error)
        raise RequestError(
            f"--kv-bits {bits} with groups of {group} cannot be honoured ({why}); use other values or leave it out"
        ) from None


def choose_dtype(name: str | None) -> mx.Dtype | None:
    """None keeps what is stored. On the CPU float32 is the fast format, and quantized products are only right with
    float32 activations there."""
    if name is None:
        return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else None
    if name not in DTYPES:
        raise RequestError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _cast(module: nn.Module, dtype: mx.Dtype | None) -> None:
    if dtype is not None:
        module.update(
            tree_map(lambda a: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a, module.parameters())
        )


def build_trunk(folder: Path, config: dict, tensors: dict, in_head: set[str], trust_remote_code: bool) -> nn.Module:
    """mlx-lm's model with the checkpoint's weights but for the head's (`in_head`), strictly."""
    plain = not any(k in config for k in ("quantization", "quantization_config", "model_file"))
    try:
        if plain and config.get("model_type") in mlxlm.DIRECT:
            model_class, args_class = mlxlm.classes(config)
            model = model_class(args_class.from_dict(config))
            weights = read_tensors(folder, tensors, set(tensors) - in_head)
            model.eval()
            model.load_weights(list(model.sanitize(weights).items() if hasattr(model, "sanitize") else weights.items()))
            return model
        if config.get("model_type") in families.VLM:
            vlm.check(config, tensors)
        mlxlm.classes(config)
        return mlxlm.load(folder, in_head, trust_remote_code)
    except ModelError:
        raise
    except Exception as error:  # mlx-lm's code on somebody's config: anything may come
        raise ModelError(f"{folder} does not fit its config.json: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


def read_tensors(folder: Path, tensors: dict[str, headers.TensorInfo], names: set[str] | None = None) -> dict:
    """The named tensors (all by default) as lazy arrays."""
    out: dict[str, mx.array] = {}
    for file in sorted({t.file for n, t in tensors.items() if names is None or n in names}):
        loaded = mx.load(str(folder / file))
        out.update({n: a for n, a in loaded.items() if names is None or n in names})
    return out


def wanted_layers(spec: Any, config: dict, tensors: dict, *, require: bool) -> int:
    """Number of head layers to load; 0 for none. A head declared without tensors, or the reverse, is an error."""
    if spec is None:
        if require:
            kind = config.get("model_type")
            raise ModelError(families.NO_HEAD.get(kind) or f"model_type {kind!r} has no MTP head that mtplab knows")
        return 0
    key, declared = headspec.declared(spec, config) or (spec.count_keys[0], None)
    found = headspec.head_names(spec, tensors)
    if declared and not found:
        first = spec.name("proj", spec.prefixes[0], 0) + ".weight"
        raise ModelError(
            f"config.json declares {declared} MTP layer(s) ({key}) but the files hold no head tensor "
            f"(missing {first} and the rest); "
            f"{headload.WITHOUT_HEAD}, or take a conversion that keeps it"
        )
    if found and declared == 0:
        raise ModelError(
            f"the files hold head tensors ({found[0]}) but config.json says {key} = 0; {headload.WITHOUT_HEAD}"
        )
    if require and not found:
        raise ModelError("this checkpoint has no MTP head")
    if not found:
        return 0
    return declared or 1 + max((i for n in found if (i := headspec.layer_of(spec, n)) is not None), default=0)


def _check_norms(asked: str, spec: Any) -> None:
    """Only a family with two conventions has one to choose."""
    if spec is None:
        raise RequestError(
            f"--head-norms {asked} needs an MTP head of a checkpoint, and none is used here; leave it out"
        )
    if not spec.zero_centred:
        raise RequestError(
            f"--head-norms {asked} cannot be honoured: a head of the family {spec.family} stores its norm weights as "
            "they are used; leave it out"
        )


def _read_head(spec: Any, layers: int, source: headfile.HeadSource, target: Target, norms: str | None) -> heads.Head:
    tensors = source.tensors
    args = source.args or getattr(target.outer, "args", None) or target.model.args
    weights = read_tensors(source.folder, tensors, set(headspec.head_names(spec, tensors)))
    raw = None if norms is None else norms == "raw"
    if raw is None and headspec.raw_layout(spec, tensors):
        raw = True
    try:
        return headload.load_head(spec, layers, args, target, weights, source.config, raw_norms=raw)
    except (ModelError, RequestError):
        raise
    except Exception as error:
        why = _one_line(error)
        raise ModelError(f"the MTP head of {source.folder} does not fit its config.json: {why}") from error


def _refuse_nan(model: nn.Module, head: heads.Head | Assistant | None) -> None:
    for part, module in (("trunk", model), ("MTP head", head)):
        weights = [] if module is None else tree_flatten(module.parameters())
        # One at a time: all together would hold a byte for every number.
        bad = [n for n, a in weights if mx.issubdtype(a.dtype, mx.floating) and not mx.isfinite(a).all().item()]
        if bad:
            name = head.file_names[bad[0]] if module is head else bad[0]
            raise ModelError(f"{part} weight {name} is not finite (NaN or infinity); the file is damaged")


def context_length(config: dict) -> int:
    for source in (config, configs.text_of(config)):
        for key in ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length"):
            if isinstance(source.get(key), int):
                return source[key]
    return 1 << 20


def _facts(folder: Path, config: dict, target: Target, head: Any, quantized: bool, cast: Any) -> dict[str, Any]:
    sizes = {n: int(a.nbytes) for n, a in tree_flatten(target.model.parameters())}
    head_bytes = 0 if head is None else sum(int(a.nbytes) for _, a in tree_flatten(head.parameters()))
    return {
        "model": folder.name,
        "model_type": config.get("model_type"),
        "weight_bytes": sum(sizes.values()),
        "head_bytes": head_bytes,
        "quantized": quantized,
        "dtype": "as stored" if cast is None else str(cast).split(".")[-1],
        "context": context_length(config),
        "cache_kinds": sorted({k for layer in target.cache_kinds for k in layer}),
        "head": None if head is None else head.effective(),
    }
