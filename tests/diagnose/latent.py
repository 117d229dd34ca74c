"""Tiny models with latent attention (MLA), and with experts."""

from __future__ import annotations

import tiny

from mtplab.models.target import Target

DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_shared_experts": 1, "n_routed_experts": 8, "routed_scaling_factor": 1.0, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "topk_method": "noaux_tc", "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False,
}  # fmt: skip


# mlx-lm's MLA attention takes another form for one row than for several: it rounds differently on any backend.
tiny.CONFIGS.setdefault("deepseek_v3", tiny.LLAMA | {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "n_routed_experts": None, "rope_scaling": None,
})  # fmt: skip
tiny.CONFIGS.setdefault("qwen3_moe", tiny.LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 16,
})  # fmt: skip
tiny.CONFIGS.setdefault("deepseek_moe", DEEPSEEK)
# With an indexer beside the attention: two caches a layer, in the trunk and in the head. It chooses among more than
# index_topk rows.
tiny.CONFIGS.setdefault("deepseek_v32", tiny.CONFIGS["deepseek_v3"] | {
    "model_type": "deepseek_v32", "index_head_dim": 16, "index_n_heads": 2, "index_topk": 16,
    "num_nextn_predict_layers": 1,
})  # fmt: skip


def mla(**changes) -> Target:
    """A tiny DeepSeek: its attention takes another algorithm for one row than for several, on every machine."""
    return Target(tiny.made(DEEPSEEK | changes))


# Fewer caches than layers: Nemotron-H has layers without one, and Gemma 4's last layers read what earlier ones keep.
FEWER = {
    "nemotron_h": {
        "model_type": "nemotron_h", "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 5, "max_position_embeddings": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "attention_bias": False, "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_proj_bias": False,
        "ssm_state_size": 8, "conv_kernel": 4, "n_groups": 2, "mlp_bias": False, "layer_norm_epsilon": 1e-6,
        "use_bias": False, "use_conv_bias": True, "hybrid_override_pattern": ["M", "-", "*", "M", "-"], "head_dim": 8,
    },
    "gemma4_text": {
        "model_type": "gemma4_text", "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8,
        "vocab_size_per_layer_input": tiny.VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
        "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    },
}  # fmt: skip
