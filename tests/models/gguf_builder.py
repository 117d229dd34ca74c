"""Writes GGUF files: the format's other side, from its public description alone, with a plain quantizer per kind."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

CODES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30}
ALIGN = 32


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type and value of a metadata entry."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if all(isinstance(x, str) for x in item):
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(text, item))
    return struct.pack("<IIQ", 9, 5, len(item)) + struct.pack(f"<{len(item)}i", *item)


def encode(a: np.ndarray, kind: str) -> bytes:
    """float32 -> the blocks of a kind."""
    if kind in ("F32", "F16"):
        return a.astype("<f4" if kind == "F32" else "<f2").tobytes()
    if kind == "BF16":
        return (a.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    out = []
    for block in a.reshape(-1, 32):
        if kind == "Q8_0":
            d = np.float16(np.abs(block).max() / 127)
            out.append(d.tobytes() + np.clip(np.rint(block / (d or 1)), -127, 127).astype(np.int8).tobytes())
            continue
        low = np.float16(block.min()) if kind == "Q4_1" else None
        d = np.float16((block.max() - block.min()) / 15 if kind == "Q4_1" else np.abs(block).max() / 7)
        codes = np.rint((block - low) / (d or 1)) if kind == "Q4_1" else np.rint(block / (d or 1)) + 8
        codes = np.clip(codes, 0, 15).astype(np.uint8)
        out.append(d.tobytes() + (low.tobytes() if kind == "Q4_1" else b"") + (codes[:16] | codes[16:] << 4).tobytes())
    return b"".join(out)


def write(path: Path, meta: dict[str, Any], tensors: dict[str, tuple[np.ndarray, str]], version: int = 3) -> Path:
    entries, data = b"", b""
    for name, (a, kind) in tensors.items():
        data += b"\0" * (-len(data) % ALIGN)
        entries += text(name) + struct.pack("<I", a.ndim) + struct.pack(f"<{a.ndim}Q", *a.shape[::-1])
        entries += struct.pack("<IQ", CODES[kind], len(data))
        data += encode(a, kind)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(meta))
    head += b"".join(text(k) + value(v) for k, v in meta.items()) + entries
    path.write_bytes(head + b"\0" * (-len(head) % ALIGN) + data)
    return path


OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INNER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def llama(path: Path, config: dict, weights: dict[str, np.ndarray], kind: str = "F32", **meta: Any) -> Path:
    """A llama checkpoint's weights as GGUF: matrices in `kind`, norms in F32, q and k with their halves interleaved."""
    tensors = {}
    for name, a in weights.items():
        stem, _, last = name.rpartition(".")
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        if (n := heads.get(stem.rpartition(".")[2])) is not None:
            size = a.shape[0] // n
            order = [h * size + half * (size // 2) + i for h in range(n) for i in range(size // 2) for half in (0, 1)]
            a = a[order]
        layer = stem.split(".")
        new = OUTER.get(stem) or f"blk.{layer[2]}.{INNER['.'.join(layer[3:])]}"
        tensors[f"{new}.{last}"] = (a, kind if a.ndim == 2 else "F32")
    return write(path, metadata(config) | meta, tensors)


def metadata(config: dict) -> dict[str, Any]:
    tokens = (
        [chr(33 + i) for i in range(61)]
        + ["a", "b", "c", "Ġ", "ab", "abc", "<end>"]
        + [f"<{i}>" for i in range(68, 97)]
    )
    return {
        "general.architecture": "llama",
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 67 + [3] + [1] * 29,
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 67,
        "tokenizer.ggml.eos_token_id": 67,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
