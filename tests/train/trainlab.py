"""Tiny trunks and runs for the tests of head training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import tiny

from mtplab.models import load_target
from mtplab.train.plan import HeadPlan
from mtplab.train.run import train
from mtplab.trials.progress import Progress

SMALL = {
    "corpora": ("c",), "rows": 12, "length": 32, "prompt_tokens": 8, "gather": 6, "batch": 3, "ffn": 32,
    "candidates": 0, "seed": 3,
}  # fmt: skip


def successor(folder: Path, kind: str = "llama") -> Path:
    """A trunk that knows one rule: after token x comes x + 1. Its layers add nothing, its unembedding is shifted."""
    tiny.build(folder, kind)
    weights = {n: mx.array(a) for n, a in mx.load(str(folder / "model.safetensors")).items()}
    for name, a in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = mx.zeros(a.shape)
    weights["model.norm.weight"] = mx.ones(tiny.LLAMA["hidden_size"])
    weights["lm_head.weight"] = 0.5 * mx.roll(weights["model.embed_tokens.weight"], 1, axis=0)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def make(out: Path, model: Path, *, resume: bool = False, **changes: Any) -> dict[str, Any]:
    plan = HeadPlan(model=str(model), **SMALL | {"steps": 12} | changes)
    return train(out, plan, Progress(quiet=True), resume=resume)


def loaded_with(model: Path, out: Path):
    return load_target(model, head="require", head_folder=out / "head")


def head_bytes(out: Path) -> bytes:
    return (out / "head" / "model.safetensors").read_bytes()
