"""What a checkpoint holds, from its headers and config alone: no weight is loaded.

Only the norm weights of an MTP head (a few kilobytes) are read where their convention must be recognised.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtplab.errors import ModelError
from mtplab.models import headers, headspec
from mtplab.models.canvas import describe
from mtplab.models.canvas.names import is_canvas

CONTEXTS = (4096, 32768, 131072)


def inspect_checkpoint(folder: Path | str) -> dict[str, Any]:
    """A JSON-able description: family, head, bytes by part, kinds, cache kinds, memory by context, what is possible."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json, so it is not a checkpoint folder")
    config, tensors = headers.read_json(folder / "config.json"), headers.read_headers(folder)
    spec = headspec.find_spec(config)
    head_names = set(headspec.head_names(spec, tensors)) if spec is not None else set()
    head = describe_head(folder, spec, config, tensors, head_names)
    out = {
        "folder": folder.name,
        "model_type": config.get("model_type"),
        "files": len({t.file for t in tensors.values()}),
        "tensors": len(tensors),
        "parameters": parameter_count(tensors, config),
        "bytes": bytes_by_part(tensors, head_names),
        "dtypes": dict(Counter(t.dtype for t in tensors.values()).most_common()),
        "quantization": describe_quantization(config, tensors, head_names),
        "context": context_of(config),
        "cache": describe_cache(config),
        "head": head,
    }
    if is_canvas(config.get("model_type")):
        return out | _canvas(folder, config, tensors, out)
    out["memory"] = memory_by_context(out, kv_bytes_per_token(config))
    out["arms"] = arms(out)
    return out


def _canvas(folder: Path, config: dict[str, Any], tensors: dict[str, headers.TensorInfo], out: dict) -> dict[str, Any]:
    """The lines of a canvas checkpoint, and those that are different there."""
    how = "never needed: only finished canvases are written"
    cache = {"layers": out["cache"]["layers"], "rollback": dict.fromkeys(out["cache"]["rollback"], how)}
    used = out["bytes"]["total"] - out["bytes"].get("vision", 0)
    counted = out | {"cache": cache, "bytes": {"total": used}}
    return {
        "cache": cache,
        "canvas": describe.describe(folder, config, tensors),
        "memory": memory_by_context(counted, describe.kv_bytes_per_token(config)),
        "arms": describe.arms(config["model_type"]),
    }


def _text(config: dict[str, Any]) -> dict[str, Any]:
    return config | (config.get("text_config") or {})


def parameter_count(tensors: dict[str, headers.TensorInfo], config: dict[str, Any]) -> int:
    """Weights, with packed ones counted by their bits; scales and biases of quantization are not parameters."""
    total = 0
    for name, t in tensors.items():
        if name.endswith((".scales", ".biases")):
            continue
        bits = stored_bits(name, tensors, config)
        total += t.nbytes * 8 // bits if bits else t.nbytes // headers.ITEM_BYTES[t.dtype]
    return total


def stored_bits(name: str, tensors: dict[str, headers.TensorInfo], config: dict[str, Any]) -> int | None:
    """Bits per weight of a packed tensor (its module has scales), else None."""
    stem = name.removesuffix(".weight")
    if f"{stem}.scales" not in tensors or not name.endswith(".weight"):
        return None
    table = config.get("quantization") or config.get("quantization_config") or {}
    own = table.get(stem)
    return int((own if isinstance(own, dict) else table).get("bits", 4))


def bytes_by_part(tensors: dict[str, headers.TensorInfo], head_names: set[str]) -> dict[str, int]:
    parts: Counter[str] = Counter()
    for name, t in tensors.items():
        parts[_part(name, head_names)] += t.nbytes
    return dict(parts) | {"total": sum(parts.values())}


def _part(name: str, head_names: set[str]) -> str:
    if name in head_names:
        return "mtp head"
    if "embed_tokens" in name or "wte" in name:
        return "embedding"
    if "lm_head" in name:
        return "unembedding"
    return "vision" if "visual" in name or "vision" in name else "trunk"


def describe_quantization(config: dict, tensors: dict, head_names: set[str]) -> dict[str, Any] | None:
    """The global kind and which share of each part is packed; None for an unquantized checkpoint."""
    packed = {n.removesuffix(".scales") for n in tensors if n.endswith(".scales")}
    table = config.get("quantization") or config.get("quantization_config")
    if not packed and not table:
        return None
    general = {k: v for k, v in (table or {}).items() if not isinstance(v, dict)}
    own = {k: v for k, v in (table or {}).items() if isinstance(v, dict)}
    in_head = sum(f"{p}.scales" in head_names for p in packed)
    return {"default": general, "modules_with_their_own": len(own), "packed": len(packed), "packed_in_head": in_head}


def describe_head(folder: Path, spec: Any, config: dict, tensors: dict, names: set[str]) -> dict[str, Any]:
    """Status "none", "present", "declared" (the config says so, no tensors) or "missing" (some tensors lack)."""
    if spec is None:
        return {"status": "none", "why": f"no MTP head is known for model_type {config.get('model_type')!r}"}
    declared = headspec.declared_layers(spec, config)
    out: dict[str, Any] = {"family": spec.family, "declared_layers": declared, "tensors": len(names)}
    if not names:
        status = "declared" if declared else "none"
        why = "config.json declares a head but its tensors are not in the files" if declared else "no head tensors"
        return out | {"status": status, "why": why}
    prefix = next((p for p in spec.prefixes if f"{spec.proj.format(p=p, i=0)}.weight" in names), spec.prefixes[0])
    roles = ("embed_norm", "hidden_norm", "proj", "final_norm")
    found = {r: f"{getattr(spec, r).format(p=prefix, i=0)}.weight" for r in roles}
    missing = [n for n in found.values() if n not in names]
    out |= {"status": "missing" if missing else "present", "missing": missing, "spec": spec.effective()}
    out["shapes"] = {r: list(tensors[n].shape) for r, n in found.items() if n in names}
    out["norm_means"] = norm_means(folder, tensors, sorted(n for n in names if tensors[n].shape and "norm" in n))
    return out


def norm_means(folder: Path, tensors: dict[str, headers.TensorInfo], names: Iterable[str]) -> dict[str, float | None]:
    """Mean of each norm weight, read straight from the file: near 0 is zero-centred, near 1 is shifted."""
    import numpy as np

    out: dict[str, float | None] = {}
    for name in names:
        t = tensors[name]
        if len(t.shape) != 1:
            continue
        raw = _bytes_of(folder / t.file, name)
        if t.dtype == "BF16":
            values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif t.dtype in ("F16", "F32", "F64"):
            values = np.frombuffer(raw, {"F16": np.float16, "F32": np.float32, "F64": np.float64}[t.dtype])
        else:
            continue
        mean = float(values.astype(np.float64).mean())
        out[name] = round(mean, 4) if np.isfinite(mean) else None
    return out


def _bytes_of(path: Path, name: str) -> bytes:
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        begin, end = json.loads(f.read(length))[name]["data_offsets"]
        f.seek(8 + length + begin)
        return f.read(end - begin)


def context_of(config: dict[str, Any]) -> int | None:
    value = _text(config).get("max_position_embeddings")
    return value if isinstance(value, int) else None


def describe_cache(config: dict[str, Any]) -> dict[str, Any]:
    """Layers by kind of state, as far as the config tells, and whether each can be rolled back."""
    c = _text(config)
    layers = c.get("num_hidden_layers") or 0
    interval, window, pattern = (
        c.get("full_attention_interval"),
        c.get("sliding_window"),
        c.get("sliding_window_pattern"),
    )
    types = c.get("layer_types")
    if isinstance(types, list):
        kinds = Counter(
            "recurrent" if "linear" in str(t) else "sliding" if "sliding" in str(t) else "full" for t in types
        )
    elif interval and c.get("linear_num_value_heads"):
        kinds = Counter({"full": layers // interval, "recurrent": layers - layers // interval})
    elif window and pattern:
        kinds = Counter({"full": layers // pattern, "sliding": layers - layers // pattern})
    else:
        kinds = Counter({"full": layers})
    how = {"full": "length", "sliding": "length and window", "recurrent": "replay of the rows kept"}
    return {"layers": {k: n for k, n in kinds.items() if n}, "rollback": {k: how[k] for k in kinds if kinds[k]}}


def kv_bytes_per_token(config: dict[str, Any]) -> int | None:
    """Keys and values of one full-attention layer and one token in 16 bits; None if the config does not tell."""
    c = _text(config)
    heads = c.get("num_key_value_heads") or c.get("num_attention_heads")
    size = c.get("head_dim") or (c.get("hidden_size", 0) // (c.get("num_attention_heads") or 1))
    return 2 * heads * size * 2 if heads and size else None


def memory_by_context(described: dict[str, Any], per_token: int | None) -> dict[str, int | None]:
    """Bytes for weights as stored plus KV of the full layers (16 bits), at the usual contexts up to the model's own."""
    weights = described["bytes"]["total"]
    limit = described["context"] or max(CONTEXTS)
    full = described["cache"]["layers"].get("full", 0)
    wanted = [c for c in CONTEXTS if c <= limit] or [limit]
    return {str(c): None if per_token is None else weights + c * per_token * full for c in wanted}


def arms(described: dict[str, Any]) -> dict[str, str]:
    """Every arm with "yes" or the reason why not."""
    head = described["head"]
    reason = "yes" if head["status"] == "present" else head.get("why") or f"missing {', '.join(head['missing'])}"
    return {"baseline": "yes", "depth0": "yes", "ngram1..8": "yes", "depth1..8": reason, "adaptive": reason}
