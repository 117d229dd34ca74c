"""What decoding will keep in memory, from a config alone: layers by kind of state and their bytes per token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

CONTEXTS = (4096, 32768, 131072)
HALF = 2  # bytes of a cached number; float32 doubles everything but recurrent states, which are float32 anyway
ROLLBACK = {
    "full": "yes: the length goes back",
    "latent": "yes: the length goes back",
    "sliding": "yes: rejected rows are cut off the window",
    "recurrent": "yes: the state before the block returns and the rows kept run again",
    "stateless": "nothing to roll back",
}
# Families of mlx-lm with a layer cache of their own kind, which `models.cache` takes for unknown.
NO_ROLLBACK = {"llama4": "ChunkedKVCache", "deepseek_v41": "LayerCache", "deepseek_v41_text": "LayerCache"}
TYPES = {
    "full_attention": "full", "attention": "full", "global": "full", "sliding_attention": "sliding",
    "linear_attention": "recurrent", "mamba": "recurrent", "conv": "recurrent", "moe": "stateless", "mlp": "stateless",
}  # fmt: skip
PATTERN = {"*": "full", "M": "recurrent", "E": "stateless", "-": "stateless"}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return dict(config) | (text if isinstance(text, dict) else {})


def number(config: Mapping[str, Any], *keys: str) -> int:
    """The first of the keys that holds a positive whole number, else 0."""
    return next((config[k] for k in keys if type(config.get(k)) is int and config[k] > 0), 0)


LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def layer_kinds(config: Mapping[str, Any]) -> Counter[str]:
    """Layers by kind of state: full, latent (MLA), sliding, recurrent, stateless."""
    c = text_config(config)
    layers, interval = number(c, *LAYERS), number(c, "full_attention_interval")
    window, period = number(c, "sliding_window"), number(c, "sliding_window_pattern")
    if not period and str(c.get("model_type", "")).startswith("gemma3"):
        period = 6  # mlx-lm's default where the config leaves it out
    pattern, types = c.get("hybrid_override_pattern"), c.get("layer_types") or c.get("layers_block_type")
    if isinstance(pattern, (str, list)):
        kinds = Counter(PATTERN.get(str(p), "full") for p in pattern)
    elif isinstance(types, list) and types:
        own = types[: layers or None]  # Step lists its MTP layers, too
        kinds = Counter(TYPES.get(str(t), "latent" if number(c, "kv_lora_rank") else "full") for t in own)
    elif number(c, "linear_num_value_heads"):
        kinds = Counter({"full": layers // (interval or 4), "recurrent": layers - layers // (interval or 4)})
    elif window and period:
        kinds = Counter({"full": layers // period, "sliding": layers - layers // period})
    else:
        kinds = Counter({"latent" if number(c, "kv_lora_rank") else "full": layers})
    shared = number(c, "num_kv_shared_layers")
    if shared and sum(kinds.values()) > shared and isinstance(types, list):
        kinds = Counter(TYPES.get(str(t), "full") for t in types[: len(types) - shared])
        kinds["stateless"] += shared  # they read the KV of an earlier layer
    return Counter({k: n for k, n in kinds.items() if n > 0})


def describe_cache(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers by kind of state and whether each can be rolled back ("no: " and why, where a family's cannot)."""
    kinds, kind = layer_kinds(config), config.get("model_type")
    odd = NO_ROLLBACK.get(kind) if isinstance(kind, str) else None
    no = f"no: {odd} cannot be rolled back; use baseline or depth0"
    return {"layers": dict(kinds), "rollback": {k: no if odd else ROLLBACK[k] for k in kinds}}


def bytes_per_token(config: Mapping[str, Any]) -> dict[str, int] | None:
    """Bytes that one token adds to one layer of each growing kind; None if the config does not tell."""
    c = text_config(config)
    heads, queries = number(c, "num_key_value_heads", "num_attention_groups"), number(c, "num_attention_heads")
    heads = heads or queries
    size = number(c, "head_dim") or (number(c, "hidden_size") // queries if queries else 0)
    rank = number(c, "kv_lora_rank")
    latent = (rank + number(c, "qk_rope_head_dim") + 2 * number(c, "index_head_dim")) * HALF
    wide = 2 * (number(c, "num_global_key_value_heads") or heads) * (number(c, "global_head_dim") or size) * HALF
    if not rank and not (heads and size):
        return None
    index = number(c, "indexer_head_dim") * HALF  # keys of an indexer beside the attention
    return {"full": wide + index, "latent": latent, "sliding": 2 * heads * size * HALF}


def state_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of one recurrent layer's state, whatever the context: gated delta (float32) or Mamba-2."""
    c = text_config(config)
    keys, values = number(c, "linear_key_head_dim"), number(c, "linear_value_head_dim")
    heads = number(c, "linear_num_value_heads")
    conv = 2 * number(c, "linear_num_key_heads") * keys + heads * values
    delta = heads * keys * values * 4 + (number(c, "linear_conv_kernel_dim") or 1) * conv * HALF
    inner = number(c, "mamba_num_heads") * number(c, "mamba_head_dim")
    mixed = inner + 2 * number(c, "n_groups") * number(c, "ssm_state_size")
    mamba = inner * number(c, "ssm_state_size") * 4 + number(c, "conv_kernel") * mixed * HALF
    return delta if heads else mamba


def context_of(config: Mapping[str, Any]) -> int | None:
    c = text_config(config)
    return number(c, "max_position_embeddings", "max_sequence_length", "n_positions", "seq_length") or None


def memory_by_context(
    config: Mapping[str, Any],
    weights: int,
    head_layers: int,
    *,
    head_config: Mapping[str, Any] | None = None,
    per: Mapping[str, int] | None = None,
    known: bool = False,
) -> dict[str, int | None]:
    """Bytes for weights as stored plus cache at 16 bits, at the usual contexts up to the model's own.

    `head_layers`: layers of the MTP head, each with a cache of its own, shaped by `head_config` where that is not the
    trunk's. Activations are not in it. `per`, when `known`: bytes per token and layer instead of those that the config
    tells (None: unknown).
    """
    per, kinds = per if known else bytes_per_token(config), layer_kinds(config)
    limit = context_of(config) or max(CONTEXTS)
    wanted = [c for c in CONTEXTS if c <= limit] or [limit]
    if per is None:
        return dict.fromkeys(map(str, wanted))
    head = None if head_config in (None, config) else bytes_per_token(head_config)
    if head is None:
        kinds["latent" if kinds["latent"] else "full"] += head_layers
    window, fixed = number(text_config(config), "sliding_window"), kinds["recurrent"] * state_bytes(config)
    out = {}
    for c in wanted:
        cached = c * (kinds["full"] * per["full"] + kinds["latent"] * per["latent"])
        cached += c * head_layers * head["full"] if head else 0
        out[str(c)] = weights + fixed + cached + min(c, window or c) * kinds["sliding"] * per["sliding"]
    return out
