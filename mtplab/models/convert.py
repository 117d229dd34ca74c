"""A llama in GGUF -> a checkpoint folder of mlx-lm, with its tokenizer.

What is left to do once the blocks are read (`gguf`):

- names: `blk.3.attn_q` -> `model.layers.3.self_attn.q_proj`
- q and k: GGUF stores their rows with the two halves of each head interleaved (row 2i is row i of the first half);
  mlx-lm's rotary embedding takes the halves one after the other, so the rows are put back, head by head
- the weights: dequantized, or packed as they are (Q4_0, Q4_1, Q8_0 are affine at group 32), which loses nothing
- the tokenizer: a byte-level BPE whose vocabulary and merges are in the metadata (`gguf_tokenizer`)

What a llama of mlx-lm cannot express (scaled rotary embeddings, experts) is refused by name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mtplab.errors import ModelError, RequestError
from mtplab.models import configs, gguf, gguf_tokenizer

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
DTYPES = {"float32": np.float32, "float16": np.float16, "stored": None}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def convert(source: Path, folder: Path, *, dtype: str = "float16", tokenizer: Path | None = None) -> dict[str, Any]:
    """Write a checkpoint folder from a GGUF file, whole or not at all; returns what was done.

    `dtype`: float32 and float16 dequantize, "stored" keeps quantized blocks as mlx's affine
    quantization and every other value exactly.
    `tokenizer`: a folder whose tokenizer files are taken instead of the metadata's tokenizer.
    Raises ModelError (the file) or RequestError (the options, a folder that is there already).
    """
    if dtype not in DTYPES:
        raise RequestError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if folder.exists():
        raise RequestError(f"{folder} exists already; choose another folder")
    meta, tensors = gguf.read(source)
    config = config_of(meta, tensors)
    check_tensors(tensors, config)
    # Before the weights: it takes no time, and nothing is decoded for a file that is refused then.
    files = {"config.json": config} | ({} if tokenizer is not None else gguf_tokenizer.files(meta))
    arrays, packed = weights(tensors, config, dtype)
    if packed:
        # mlx-lm quantizes what has scales; a kind of its own is named per module.
        config["quantization"] = {"group_size": gguf.BLOCK, "bits": 4, "mode": "affine"} | packed
    _write(folder, arrays, files, tokenizer)
    kinds = sorted({t.kind.name for t in tensors.values()})
    parameters = sum(int(np.prod(t.shape)) for t in tensors.values())
    return {"folder": str(folder), "parameters": parameters, "kinds": kinds, "dtype": dtype, "config": config}


def config_of(meta: Mapping[str, Any], tensors: Mapping[str, gguf.Tensor]) -> dict[str, Any]:
    """mlx-lm's llama config from the metadata. Raises ModelError for what it cannot express."""
    kind = meta.get("general.architecture")
    if kind != "llama":
        raise ModelError(
            f"the GGUF file holds a {configs.shown(kind)} (general.architecture); only llamas can be converted"
        )
    scaling = meta.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        said = f"llama.rope.scaling.type is {configs.shown(scaling)}"
        raise ModelError(f"this model scales its rotary embedding ({said}), which the conversion cannot express")
    experts = _whole(meta, "llama.expert_count", 0, least=0)
    if experts:
        raise ModelError(f"this model has {experts} experts; only dense llamas can be converted")
    try:
        return _config(meta, tensors)
    except KeyError as error:
        raise ModelError(f"the GGUF file lacks the metadata {error.args[0]!r}") from None


def _config(meta: Mapping[str, Any], tensors: Mapping[str, gguf.Tensor]) -> dict[str, Any]:
    dim, heads = _whole(meta, "llama.embedding_length"), _whole(meta, "llama.attention.head_count")
    size = _whole(meta, "llama.attention.key_length", dim // heads or 1)
    for name, value in (("rope.dimension_count", size), ("attention.value_length", size)):
        found = meta.get(f"llama.{name}", value)
        if found != value:
            raise ModelError(
                f"llama.{name} is {configs.shown(found)} where heads are {value} wide; cannot be expressed"
            )
    if "token_embd.weight" not in tensors:
        raise ModelError("the GGUF file lacks the tensor 'token_embd.weight'")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dim,
        "num_hidden_layers": _whole(meta, "llama.block_count"),
        "intermediate_size": _whole(meta, "llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(meta, "llama.attention.head_count_kv", heads),
        "head_dim": size,
        # float32 in the file: 9.999999747378752e-06 was 1e-5.
        "rms_norm_eps": float(f"{_positive(meta, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(f"{_positive(meta, 'llama.rope.freq_base', 10000.0):.7g}"),
        "max_position_embeddings": _whole(meta, "llama.context_length"),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "float16",
        **gguf_tokenizer.ids(meta),
    }


def _whole(meta: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    value = meta[key] if default is None else meta.get(key, default)
    if not configs.whole(value, least):
        raise gguf.wrong(key, value, f"a whole number of at least {least}")
    return value


def _positive(meta: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = meta[key] if default is None else meta.get(key, default)
    if not configs.positive(value):
        raise gguf.wrong(key, value, "a number above 0")
    return value


def name_of(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    stem, _, last = name.rpartition(".")
    if last in ("weight", "bias"):
        if stem in OUTER_NAMES:
            return f"{OUTER_NAMES[stem]}.{last}"
        parts = stem.split(".")
        if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in LAYER_NAMES:
            return f"model.layers.{int(parts[1])}.{LAYER_NAMES[parts[2]]}.{last}"
    raise ModelError(f"the GGUF file has a tensor {name!r} that a llama has not")


def check_tensors(tensors: Mapping[str, gguf.Tensor], config: Mapping[str, Any]) -> None:
    """The file holds every tensor of the llama that its metadata describe, in its shape, and no other. ModelError."""
    for name in tensors:
        name_of(name)
    expected = {}
    for name, shape in shapes(config):
        if name not in tensors:
            raise ModelError(f"the GGUF file lacks the tensor {name!r}; download it again")
        if tensors[name].shape != shape:
            raise ModelError(
                f"the tensor {name!r} has shape {list(tensors[name].shape)}, the model needs {list(shape)}"
            )
        expected[name] = shape
    left = next((n for n in tensors if n not in expected), None)
    if left is not None:
        raise ModelError(f"the GGUF file has the tensor {left!r}, which the model of its metadata has no place for")


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(GGUF's name, shape) of every tensor of a llama."""
    dim, ffn, vocab, size = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    rows = {"attn_q": (q, dim), "attn_k": (kv, dim), "attn_v": (kv, dim), "attn_output": (dim, q)}
    rows |= {"ffn_gate": (ffn, dim), "ffn_up": (ffn, dim), "ffn_down": (dim, ffn)}
    yield "token_embd.weight", (vocab, dim)
    yield "output_norm.weight", (dim,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", (vocab, dim)
    for i in range(config["num_hidden_layers"]):
        for name in LAYER_NAMES:
            shape = rows.get(name, (dim,))
            yield f"blk.{i}.{name}.weight", shape
            # mlx-lm's llama has the biases of all projections of a block's half or none of them.
            if config["attention_bias" if name.startswith("attn") else "mlp_bias"] and len(shape) == 2:
                yield f"blk.{i}.{name}.bias", shape[:1]


def halves_in_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads * d, ...] with the halves of each head interleaved -> first half, then second half."""
    width = rows.shape[0] // heads
    return rows.reshape(heads, width // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def weights(
    tensors: Mapping[str, gguf.Tensor], config: Mapping[str, Any], dtype: str
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays under mlx-lm's names, quantized modules with their kind)."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    arrays: dict[str, np.ndarray] = {}
    packed: dict[str, Any] = {}
    for source, tensor in tensors.items():
        name = name_of(source)
        stem, _, last = name.rpartition(".")
        count = heads.get(stem.rpartition(".")[2])
        if count and (tensor.shape[0] % (2 * count)):
            raise ModelError(f"the tensor {source!r} has {tensor.shape[0]} rows, which are not {count} even heads")
        order = (lambda a, n=count: halves_in_order(a, n)) if count else (lambda a: a)
        parts = tensor.packed() if dtype == "stored" and last == "weight" and len(tensor.shape) == 2 else None
        if parts is None:
            floats = order(tensor.floats())
            arrays[name] = _halves(floats)[0] if DTYPES[dtype] is None else _cast(source, floats, DTYPES[dtype])
        else:
            arrays |= _pack(stem, tuple(map(order, parts[:3])), parts[3])
            packed[stem] = {"group_size": gguf.BLOCK, "bits": parts[3], "mode": "affine"}
    return arrays, packed


def _cast(source: str, floats: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = floats.astype(dtype)
    if np.isinf(cast).any() and np.isfinite(floats).all():
        raise RequestError(f"the tensor {source!r} does not fit float16; use --dtype float32 or stored")
    return cast


def _pack(stem: str, parts: tuple[np.ndarray, ...], bits: int) -> dict[str, np.ndarray]:
    """Codes into 32-bit words, the first in the lowest bits, as mlx has them. Scales are float16 in the file."""
    codes, scales, biases = parts
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    words = np.ascontiguousarray(codes.astype(np.uint8)).view("<u4")
    return {f"{stem}.weight": words} | dict(
        zip((f"{stem}.scales", f"{stem}.biases"), _halves(scales, biases), strict=True)
    )


def _halves(*values: np.ndarray) -> list[np.ndarray]:
    """All as float16 if that changes none of them (128 scales may be beyond it), else all as they are."""
    with np.errstate(over="ignore"):
        halves = [v.astype(np.float16) for v in values]
    exact = all(np.array_equal(h.astype(np.float32), v) for h, v in zip(halves, values, strict=True))
    return halves if exact else list(values)


def _write(folder: Path, arrays: dict[str, np.ndarray], files: dict[str, Any], tokenizer: Path | None) -> None:
    import json

    import mlx.core as mx

    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    try:
        fresh.mkdir(parents=True)
        mx.save_safetensors(
            str(fresh / "model.safetensors"), {n: mx.array(a) for n, a in arrays.items()}, {"format": "mlx"}
        )
        for name, content in files.items():
            (fresh / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        if tokenizer is not None:
            _copy_tokenizer(tokenizer, fresh)
        os.rename(fresh, folder)
    except OSError as error:
        raise RequestError(f"cannot write {folder}: {error.strerror or error}; choose another folder") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    if not (source / "tokenizer.json").is_file():
        raise RequestError(f"{source} has no tokenizer.json; name a folder with the model's tokenizer files")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
