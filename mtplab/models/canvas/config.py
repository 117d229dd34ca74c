"""config.json of the canvas families, read and checked. Imports no mlx, so that `inspect` needs none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtplab.errors import ModelError

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True)
class GemmaArgs:
    """DiffusionGemma: the text part of config.json. Defaults are those of transformers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    sliding_window: int
    num_experts: int
    top_k_experts: int
    moe_intermediate_size: int
    rope: dict[str, dict[str, Any]]
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    final_logit_softcapping: float = 30.0
    max_position_embeddings: int = 131_072
    canvas_length: int = 256

    @staticmethod
    def read(config: dict[str, Any]) -> GemmaArgs:
        """Raises ModelError for a key that is missing or says what this module does not do."""
        text = config.get("text_config") or {}
        given = {k: text[k] for k in GemmaArgs.__dataclass_fields__ if text.get(k) is not None}
        layers = text.get("num_hidden_layers")
        types = list(text.get("layer_types") or [FULL if i % 6 == 5 else SLIDING for i in range(layers or 0)])
        if types:
            types[-1] = FULL  # as transformers does: the last layer always sees everything
        given |= {"layer_types": tuple(types), "rope": ROPE | (text.get("rope_parameters") or {})}
        given["canvas_length"] = config.get("canvas_length") or 256
        if "per_layer_config" in text:
            given |= full_heads(text, types)
        try:
            args = GemmaArgs(**given)
        except TypeError as error:
            missing = [k for k in GemmaArgs.__dataclass_fields__ if k not in given and f"'{k}'" in str(error)]
            raise ModelError(f"text_config of this diffusion_gemma checkpoint lacks {', '.join(missing)}") from error
        args.check(text, layers, config)
        return args

    def check(self, text: dict[str, Any], layers: int | None, config: dict[str, Any]) -> None:
        refused = {
            "hidden_activation": text.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh",
            "use_bidirectional_attention": text.get("use_bidirectional_attention") == "all",
            "tie_word_embeddings": config.get("tie_word_embeddings") is False,
            "layer_types": len(self.layer_types) != layers or not set(self.layer_types) <= {SLIDING, FULL},
            "rope_parameters": any(
                self.rope[k].get("rope_type") != ROPE[k]["rope_type"] or "rope_theta" not in self.rope[k] for k in ROPE
            ),
            "top_k_experts": not 0 < self.top_k_experts <= self.num_experts,
        }
        for key, bad in refused.items():
            if bad:
                value = text.get(key, config.get(key))
                raise ModelError(f"{key} = {value!r} in config.json is not supported for diffusion_gemma")

    def heads(self, kind: str) -> tuple[int, int]:
        """Key-value heads and head size of a layer."""
        if kind == SLIDING:
            return self.num_key_value_heads, self.head_dim
        return self.num_global_key_value_heads or self.num_key_value_heads, self.global_head_dim


BLOCK = 32  # what LLaDA 2 was trained with, where the config does not say


def full_heads(text: dict[str, Any], types: list[str]) -> dict[str, Any]:
    """Heads of the full layers as newer transformers saves them: by layer number, {"5": {"head_dim": 512, ...}}."""
    table = text["per_layer_config"] or {}
    each = [table.get(str(i), {}) for i, kind in enumerate(types) if kind == FULL]
    known = set(table) <= {str(i) for i, kind in enumerate(types) if kind == FULL}
    if not known or any(own != each[0] for own in each) or set(each[0]) - {"head_dim", "num_key_value_heads"}:
        raise ModelError(f"per_layer_config = {table!r} in config.json is not supported: all full layers must be alike")
    return {
        "global_head_dim": each[0].get("head_dim", text.get("head_dim")),
        "num_global_key_value_heads": each[0].get("num_key_value_heads"),
    }


@dataclass(frozen=True)
class LladaArgs:
    """LLaDA 2: config.json, as far as it is used."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    mask_token_id: int
    n_group: int = 8
    topk_group: int = 4
    num_shared_experts: int = 1
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.5
    head_dim: int | None = None
    partial_rotary_factor: float = 0.5
    rope_theta: float = 600_000.0
    rms_norm_eps: float = 1e-6
    use_qkv_bias: bool = False
    use_qk_norm: bool = True
    use_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32_768
    block_length: int = BLOCK

    @staticmethod
    def read(config: dict[str, Any]) -> LladaArgs:
        """Raises ModelError for a key that is missing or says what this module does not do."""
        given = {k: config[k] for k in LladaArgs.__dataclass_fields__ if config.get(k) is not None}
        try:
            args = LladaArgs(**given)
        except TypeError as error:
            missing = [k for k in LladaArgs.__dataclass_fields__ if k not in given and f"'{k}'" in str(error)]
            raise ModelError(f"config.json of this llada2_moe checkpoint lacks {', '.join(missing)}") from error
        refused = {
            "rope_scaling": config.get("rope_scaling") is not None,
            "hidden_act": config.get("hidden_act", "silu") != "silu",
            "score_function": config.get("score_function", "sigmoid") != "sigmoid",
            "use_sliding_window": bool(config.get("use_sliding_window")),
            "mask_token_id": not 0 <= args.mask_token_id < args.vocab_size,
            "n_group": args.num_experts % args.n_group != 0 or args.num_experts // args.n_group < 2,
        }
        for key, bad in refused.items():
            if bad:
                raise ModelError(f"{key} = {config.get(key)!r} in config.json is not supported for llada2_moe")
        return args

    @property
    def size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads
