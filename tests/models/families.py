"""What the tiny published checkpoints are made of: transformers' configs, the published tensor names, the configs as
published. See `published`."""

from __future__ import annotations

import copy
from typing import Any

import published
import tiny
import torch
import transformers

COMMON = {
    "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "tie_word_embeddings": False, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
MLA = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
SIGMOID_MOE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
SOFTMAX_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "num_hidden_layers": 4,
}  # fmt: skip
INDEXER = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 64}
STEP = {k: v for k, v in COMMON.items() if k != "pad_token_id"} | GQA | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "share_expert_dim": 32,
    "sliding_window": 6, "num_hidden_layers": 4, "moe_layers_enum": "2,3", "num_nextn_predict_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    + ["sliding_attention"] * 2 + ["full_attention"],
    "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2}, "rope_parameters": None,
    "rope_theta": 10000.0, "moe_router_scaling_factor": 3.0,
}  # fmt: skip
UNUSED = ("rms_norm_eps", "rope_parameters", "num_hidden_layers")
NEMOTRON = {k: v for k, v in COMMON.items() if k not in UNUSED} | GQA | {
    "layers_block_type": ["mamba", "attention", "moe", "mamba", "mlp"], "layer_norm_epsilon": 1e-6,
    "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "use_mamba_kernels": False,
}  # fmt: skip

# family: (transformers' class stem, its config's class stem, settings, head layers)
FAMILIES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "mimo": ("Qwen2ForCausalLM", "Qwen2Config", COMMON | GQA, 2),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", COMMON | GQA | LINEAR | SOFTMAX_MOE | PARTIAL, 1),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", COMMON | GQA | LINEAR | PARTIAL, 1),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", COMMON | GQA | LINEAR | SOFTMAX_MOE | PARTIAL, 1),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", COMMON | MLA | SIGMOID_MOE, 2),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", COMMON | MLA | SIGMOID_MOE | INDEXER, 1),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", COMMON | MLA | SIGMOID_MOE | INDEXER, 1),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        COMMON | GQA | SIGMOID_MOE | PARTIAL | {"use_qk_norm": True},
        1,
    ),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", COMMON | MLA | SIGMOID_MOE, 1),
    "step3p5": ("Step3p7TextModel", "Step3p7TextConfig", STEP, 3),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig", NEMOTRON, 1),
}
NUMBERED = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "step3p5")
ZERO_CENTRED = (
    "Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Step3p7RMSNorm", "Qwen4ExpTextRMSNorm",
)  # fmt: skip


def zero_centred(module: Any) -> bool:
    """transformers adds one to the weight of these classes."""
    return type(module).__name__ in ZERO_CENTRED


def transformers_config(family: str) -> tuple[Any, type, int]:
    """(config, model class, number of head layers)."""
    model, config_class, settings, head_layers = FAMILIES[family]
    config = getattr(transformers, config_class)(**copy.deepcopy(settings))
    if family not in OWN_BLOCKS:
        config.num_mtp_layers = head_layers
        if getattr(config, "layer_types", None):
            config.mtp_layer_types = [config.layer_types[-1]] * head_layers
        if getattr(config, "mlp_layer_types", None):
            config.mtp_mlp_layer_types = ["sparse"] * head_layers
    config._attn_implementation = "eager"
    return config, getattr(transformers, model), head_layers


def _mimo(config: Any, main: Any, i: int) -> published.Layer:
    from transformers.models.qwen2 import modeling_qwen2 as m

    norm = lambda: m.Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps)  # noqa: E731
    proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
    block = m.Qwen2DecoderLayer(config, 0)
    return published.Layer(norm(), norm(), proj, [block], norm(), main.lm_head, hidden_first=True)


def _step(config: Any, main: Any, i: int) -> published.Layer:
    from transformers.models.step3p7 import modeling_step3p7 as m

    norm = lambda: m.Step3p7RMSNorm(config.hidden_size, eps=config.rms_norm_eps)  # noqa: E731
    proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
    own = copy.deepcopy(config)
    own.layer_types, own.mlp_layer_types = config.mtp_layer_types, config.mtp_mlp_layer_types
    unembed = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    return published.Layer(norm(), norm(), proj, [m.Step3p7DecoderLayer(own, i)], norm(), unembed)


def _nemotron(config: Any, main: Any, i: int) -> published.Layer:
    from transformers.models.nemotron_h import modeling_nemotron_h as m

    own = copy.deepcopy(config)
    own.layers_block_type = ["full_attention", "moe"]
    norm = lambda: m.NemotronHRMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)  # noqa: E731
    proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
    blocks = [m.NemotronHBlock(own, j) for j in range(2)]
    return published.Layer(norm(), norm(), proj, blocks, norm(), main.lm_head)


OWN_BLOCKS = {"mimo": _mimo, "step3p5": _step, "nemotron_h": _nemotron}


def step_names(name: str, a: torch.Tensor) -> dict[str, torch.Tensor]:
    """transformers' names of Step's layers -> the published ones."""
    if name.endswith("mlp.experts.gate_up_proj"):
        half, stem = a.shape[1] // 2, name.removesuffix("mlp.experts.gate_up_proj")
        return {f"{stem}moe.gate_proj.weight": a[:, :half], f"{stem}moe.up_proj.weight": a[:, half:]}
    for old, new in (
        ("mlp.experts.down_proj", "moe.down_proj.weight"),
        ("mlp.gate.e_score_correction_bias", "moe.router_bias"),
        ("mlp.gate.weight", "moe.gate.weight"),
        ("mlp.shared_experts.", "share_expert."),
    ):
        name = name.replace(old, new)
    return {name: a}


def head_tensors(made: published.Made, i: int, layer: published.Layer) -> dict[str, torch.Tensor]:
    """One head layer under the published names, experts one by one."""
    n = made.decoder.config.num_hidden_layers + i
    names = {
        "mimo": (f"model.mtp_layers.{i}", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "nemotron_h": (f"mtp.layers.{2 * i}", "enorm", "hnorm", "eh_proj", f"/mtp.layers.{2 * i + 1}.final_layernorm"),
        "step3p5": (f"model.layers.{n}", "enorm", "hnorm", "eh_proj", "transformer.shared_head.norm"),
    }
    if made.family in NUMBERED:
        names.setdefault(made.family, (f"model.layers.{n}", "enorm", "hnorm", "eh_proj", "shared_head.norm"))
    qwen = (f"mtp.layers.{i}", "/mtp.pre_fc_norm_embedding", "/mtp.pre_fc_norm_hidden", "/mtp.fc", "/mtp.norm")
    block, *parts = names.get(made.family, qwen)
    out: dict[str, torch.Tensor] = {}
    modules = (layer.e_norm, layer.h_norm, layer.proj, layer.final_norm)
    for part, module in zip(parts, modules, strict=True):
        out[(part[1:] if part[0] == "/" else f"{block}.{part}") + ".weight"] = module.weight.data
    for j, torch_block in enumerate(layer.blocks):
        where = f"mtp.layers.{2 * i + j}" if made.family == "nemotron_h" else block
        for name, a in torch_block.state_dict().items():
            if made.family == "step3p5":
                out |= step_names(f"{where}.{name}", a)
            elif made.family == "qwen3_5_moe":
                out[f"{where}.{name}"] = a
            else:
                out |= published.numbered(f"{where}.{name}", a)
    if made.family == "step3p5":
        out[f"{block}.transformer.shared_head.output.weight"] = layer.unembed.weight.data
    elif made.family in ("deepseek_v3", "deepseek_v32"):  # published with copies of the trunk's two tables
        out[f"{block}.shared_head.head.weight"] = made.main.lm_head.weight.data.clone()
        out[f"{block}.embed_tokens.weight"] = made.decoder.embed_tokens.weight.data.clone()
    return out


def published_config(family: str, config: dict[str, Any], head_layers: int) -> dict[str, Any]:
    """config.json as published: transformers' own entries renamed to what the files on the hub have."""
    rope = config.get("rope_parameters") or {}
    out = config | {"model_type": family, "dtype": None, "rope_theta": rope.get("rope_theta", 10000.0)}
    for key in ("mtp_layer_types", "mtp_mlp_layer_types", "mlp_layer_types", "num_mtp_layers"):
        out.pop(key, None)
    out["mtp_num_hidden_layers" if family.startswith("qwen") else "num_nextn_predict_layers"] = head_layers
    if "partial_rotary_factor" in rope:
        out["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if family in NUMBERED:
        out |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_scaling": None, "moe_layer_freq": 1}
        out |= {"first_k_dense_replace": 1}
    if family == "glm4_moe":
        out |= {"rope_scaling": {}}
    if family == "step3p5":
        out = {k: v for k, v in STEP.items() if k not in ("rope_parameters", "n_routed_experts", "num_experts_per_tok")}
        out |= {"model_type": family, "moe_num_experts": 4, "moe_top_k": 2, "num_attention_groups": 2}
    if family == "nemotron_h":
        out |= {"hybrid_override_pattern": "M*EM-", "mtp_hybrid_override_pattern": "*E", "num_hidden_layers": 5}
        for key in ("layers_block_type", "mtp_layers_block_type", "layer_types"):
            out.pop(key, None)
    return {k: v for k, v in out.items() if v is not None}
