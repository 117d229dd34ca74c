"""Tiny canvas checkpoints, written by code in the published layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import tiny
from mlx.utils import tree_flatten

from mtplab.models.canvas.loading import denoiser_class

SLIDING, FULL = "sliding_attention", "full_attention"
TEXT = {
    "model_type": "diffusion_gemma_text", "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1,
    "head_dim": 8, "global_head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "sliding_window": 8, "layer_types": [SLIDING, FULL, FULL], "num_experts": 4,
    "top_k_experts": 2, "moe_intermediate_size": 32, "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip
GEMMA = {"model_type": "diffusion_gemma", "canvas_length": 12, "tie_word_embeddings": True, "text_config": TEXT}
LLADA = {
    "model_type": "llada2_moe", "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "num_experts": 8, "num_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "tie_word_embeddings": False, "pad_token_id": 1, "mask_token_id": tiny.VOCAB - 1,
    "max_position_embeddings": 4096, "block_length": 8,
}  # fmt: skip
CONFIGS = {"gemma": GEMMA, "llada": LLADA}


def config(kind: str, text: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A config of CONFIGS with changes, those in `text` to its text part."""
    base = json.loads(json.dumps(CONFIGS[kind])) | changes
    if text:
        base["text_config"] |= text
    return base


def random_weights(settings: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Parameter path -> weights, damped where they are added to the residual: a wild net is chaotic in any code."""
    model = denoiser_class(settings["model_type"])(settings).model
    mx.random.seed(seed)
    out = {}
    for name, a in tree_flatten(model.parameters()):
        noise = mx.random.normal(a.shape)
        if "embed" in name:
            out[name] = noise * 0.5
        elif name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            out[name] = 0.3 + 0.05 * noise
        elif a.ndim == 1 and "bias" not in name:
            out[name] = 1.0 + 0.1 * noise
        else:
            out[name] = noise * (0.3 if a.ndim == 1 else a.shape[-1] ** -0.5)
    return out


def file_names(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The published names: fused experts carry no `.weight`, and LLaDA's lie one by one."""
    fused, out = (".experts.gate_up_proj.weight", ".experts.down_proj.weight"), {}
    for name, a in weights.items():
        if ".mlp.experts." in name:
            out |= {name.replace(".experts.", f".experts.{i}."): one for i, one in enumerate(a)}
        else:
            out[name.removesuffix(".weight") if name.endswith(fused) else name] = a
    return out


def write(folder: Path, settings: dict[str, Any], weights: dict[str, mx.array], generation: Any = None) -> Path:
    tiny.write(folder, settings, weights)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def build(folder: Path, kind: str, seed: int = 0, text: dict[str, Any] | None = None, **changes: Any) -> Path:
    settings = config(kind, text, **changes)
    return write(folder, settings, file_names(random_weights(settings, seed)))


def damp(model, generator, *, embedding: float) -> None:
    """Random weights for a torch model of the format, with damped post-norms: rounding must not grow by the layer."""
    import torch

    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(p.shape, generator=generator)
            if "embed_tokens.weight" in name:
                p.copy_(noise * embedding)
            elif name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                p.copy_(0.3 + 0.05 * noise)
            elif "norm" in name or ("scal" in name and "embed" not in name):
                p.copy_(1 + 0.1 * noise)
            elif p.ndim > 1:
                p.copy_(noise * p.shape[-1] ** -0.5)
