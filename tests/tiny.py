"""Tiny checkpoints, built by code in the published layouts.

Weights are random with an unembedding scaled so that logits have a standard deviation of about 3: a flat random
model invents ties and hides real ones. Every checkpoint is a folder on disk, loaded through the same code as a
real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mtplab.models import heads, headspec, mlxlm
from mtplab.models.target import Target

VOCAB = 97

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": VOCAB,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
MIMO = LLAMA | {"model_type": "mimo", "tie_word_embeddings": True, "num_nextn_predict_layers": 1}
GEMMA = {
    "model_type": "gemma3_text", "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 8, "sliding_window": 16, "sliding_window_pattern": 2, "max_position_embeddings": 4096,
}  # fmt: skip
QWEN3_5 = {
    "model_type": "qwen3_5", "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
CONFIGS = {"llama": LLAMA, "mimo": MIMO, "gemma3_text": GEMMA, "qwen3_5": QWEN3_5}


def randomize(module: nn.Module, seed: int, logit_std: float = 3.0) -> None:
    """Random weights; norms near one, the (tied or own) unembedding scaled for the wanted logit spread."""
    mx.random.seed(seed)
    params, out = tree_flatten(module.parameters()), []
    tied = not any("lm_head" in name for name, _ in params)
    for name, a in params:
        if name.endswith(("A_log", "dt_bias")):
            value = mx.random.uniform(0.0, 1.0, a.shape)
        elif name.endswith("model.norm.weight") and tied:
            # Small embeddings, so that the layers outweigh the residual: a tied model would repeat its input.
            value = (1.0 + 0.1 * mx.random.normal(a.shape)) * (logit_std / (0.1 * a.shape[-1] ** 0.5))
        elif "norm" in name and a.ndim == 1:
            value = 1.0 + 0.1 * mx.random.normal(a.shape)
        elif "embed_tokens" in name:
            value = mx.random.normal(a.shape) * (0.1 if tied else 1.0)
        elif "lm_head" in name:
            value = mx.random.normal(a.shape) * (logit_std / a.shape[-1] ** 0.5)
        elif a.ndim == 1:
            value = 0.1 * mx.random.normal(a.shape)
        else:
            value = mx.random.normal(a.shape) * (1.5 / a.shape[-1] ** 0.5)
        out.append((name, value.astype(mx.float32)))
    module.load_weights(out)


def made(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """The model of a config, with random weights."""
    model_class, args_class = mlxlm.classes(config)
    model = model_class(args_class.from_dict(dict(config)))
    randomize(model, seed)
    return model.eval()


def build(folder: Path, kind: str, seed: int = 0, *, head_layers: int | None = None, **changes: Any) -> Path:
    """Write a tiny checkpoint of `kind` (a key of CONFIGS) with its MTP head where the family has one."""
    config = CONFIGS[kind] | changes
    spec = headspec.find_spec(config)
    if spec is not None and head_layers is not None:
        config[spec.count_keys[0]] = head_layers
    model = made(config, seed)
    weights = dict(tree_flatten(model.parameters()))
    layers = headspec.declared_layers(spec, config) if spec is not None else 0
    if layers:
        target = Target(model)
        head = heads.Head(spec, getattr(target.outer, "args", None) or model.args, layers, target)
        randomize(head, seed + 1)
        params = dict(tree_flatten(head.parameters()))
        prefix = spec.prefixes[0]
        weights |= {n: params[p] for n, p in heads.expected_names(spec, head, prefix).items()}
    write(folder, config, weights)
    return folder


def write(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))


def byte_tokenizer() -> dict[str, Any]:
    """A word-level tokenizer whose token i is the printable text of i: enough for stop strings and streaming."""
    vocab = {(chr(33 + i) if i < 90 else f"<{i}>"): i for i in range(VOCAB)}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "post_processor": None, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "!"},
    }  # fmt: skip


def prompt(seed: int, length: int) -> list[int]:
    """A reproducible random prompt."""
    mx.random.seed(seed)
    return mx.random.randint(0, VOCAB, (length,)).tolist()


def edit_weights(folder: Path, change: Callable[[dict[str, mx.array]], object]) -> None:
    """`change` on the tensors of a checkpoint of one file, written back."""
    path = folder / "model.safetensors"
    weights = {k: mx.array(v) for k, v in mx.load(str(path)).items()}
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(path), weights)


def write_head(trunk: Path, place: Path, *, seed: int = 7, card: str = "") -> None:
    """A random head for a trunk without one, in a folder of its own."""
    from mtplab.models.loader import load_target
    from mtplab.train import write

    head, config = write.new_head(load_target(trunk, head="none"))
    randomize(head, seed)
    write.write_head(place, head, config, card)
