"""What `inspect` says about a canvas checkpoint, from names and config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtplab.errors import ModelError
from mtplab.models.canvas.config import FULL, GemmaArgs, LladaArgs
from mtplab.models.canvas.defaults import read_defaults
from mtplab.models.canvas.names import sort_names
from mtplab.models.headers import TensorInfo


def describe(folder: Path, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> dict[str, Any]:
    """Canvas, start, experts, what is left out, the checkpoint's own decoding defaults, and whether it can be read."""
    gemma = config["model_type"] == "diffusion_gemma"
    found = sort_names(config["model_type"], tensors)
    out: dict[str, Any] = {
        "start": "uniform random ids" if gemma else "masks",
        "self_conditioning": gemma,
        "commit_order": "causal" if gemma else "block",
        "scores_text": gemma,
        "text_tensors": sum(len(names) for names in found.text.values()),
        "tied_copies": len(found.copies),
        "vision": _left_out(found.vision, tensors),
    }
    try:
        args = (GemmaArgs if gemma else LladaArgs).read(config)
        length = args.canvas_length if isinstance(args, GemmaArgs) else args.block_length
        values, sources = read_defaults(folder, config, length)
    except ModelError as error:
        return out | {"loads": f"no: {error}"}
    out |= {"length": length, "experts": args.num_experts, "vocabulary": args.vocab_size}
    return out | {"defaults": {k: f"{v} ({sources[k]})" for k, v in values.items()}, "loads": "not tried"}


def _left_out(names: tuple[str, ...], tensors: dict[str, TensorInfo]) -> str:
    size = sum(tensors[n].nbytes for n in names)
    return f"{len(names)} tensors, {size / 2**20:.1f} MiB, recognised and left out" if names else "none"


def kv_bytes_per_token(config: dict[str, Any]) -> int | None:
    """Keys and values of one full layer and one token in 16 bits; full layers have heads of their own."""
    try:
        if config["model_type"] == "diffusion_gemma":
            heads, size = GemmaArgs.read(config).heads(FULL)
        else:
            args = LladaArgs.read(config)
            heads, size = args.num_key_value_heads, args.size
    except ModelError:
        return None
    return 2 * heads * size * 2


def arms(model_type: str) -> dict[str, str]:
    """What can be run: a canvas model has no next-token pass that mtplab decodes with."""
    why = f"{model_type} fills a canvas; use mtplab denoise"
    return {"denoise": "yes", "baseline": why, "depth0": why, "ngram1..8": why, "depth1..8": why, "adaptive": why}
