"""The tokenizer in a GGUF file's metadata -> tokenizer.json and tokenizer_config.json.

Byte-level BPE only ("gpt2" in GGUF's words), and only where the way the text is split before the merges is known: a
tokenizer that splits otherwise loads without a sound and gives the model ids it never saw. For any other take the
tokenizer files of the original model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtplab.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER = 1, 2, 3, 4  # GGUF's token types
OTHERWISE = "give the original model's tokenizer files with --tokenizer"

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _split(digits: str) -> list[dict[str, Any]]:
    pattern = {"Regex": LLAMA3 % digits}
    cut = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return [cut, BYTES | {"use_regex": False}]


# How each pre-tokenizer of GGUF cuts a text before the merges.
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTES],
    "gpt-2": [BYTES],
    "llama-bpe": _split("1,3"),
    "qwen2": _split("1"),
}
WHOLE_FIRST = ("llama-bpe",)  # a piece that is in the vocabulary is not merged


def ids(meta: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token_id and eos_token_id of config.json, where the file names them; the end of a turn ends text, too."""
    out: dict[str, Any] = {}
    bos, eos = (meta.get(f"tokenizer.ggml.{n}_token_id") for n in ("bos", "eos"))
    if bos is not None:
        out["bos_token_id"] = bos
    ends = [i for i in dict.fromkeys((eos, meta.get("tokenizer.ggml.eot_token_id"))) if i is not None]
    if ends:
        out["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return out


def files(meta: Mapping[str, Any]) -> dict[str, Any]:
    """File name -> content. Raises ModelError where the tokenizer is of another kind."""
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise ModelError(f"the file's tokenizer is of the kind {kind!r}, not a byte-level BPE; {OTHERWISE}")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(f"the file's tokenizer splits text like {pre!r}, which is not known here; {OTHERWISE}")
    try:
        return {"tokenizer.json": _tokenizer(meta, pre), "tokenizer_config.json": _settings(meta)}
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(f"the file's tokenizer is not whole ({error!r}); {OTHERWISE}") from None


def _tokenizer(meta: Mapping[str, Any], pre: str) -> dict[str, Any]:
    tokens, merges = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.merges"]
    kinds = meta.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [(i, k) for i, k in enumerate(kinds) if k in (CONTROL, USER)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **flags, "special": k == CONTROL} for i, k in added],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": _beginning(meta, tokens, pre),
        "decoder": BYTES,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in WHOLE_FIRST,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": [m.split(" ") for m in merges],
        },
    }


def _beginning(meta: Mapping[str, Any], tokens: list[str], pre: str) -> dict[str, Any] | None:
    """The beginning-of-text token before every text, where the model wants it."""
    if not meta.get("tokenizer.ggml.add_bos_token", pre in WHOLE_FIRST):
        return None
    number = meta["tokenizer.ggml.bos_token_id"]
    bos = tokens[number]
    first, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    table = {bos: {"id": bos, "ids": [number], "tokens": [bos]}}
    return {
        "type": "TemplateProcessing", "single": [first, text], "pair": [first, text, second], "special_tokens": table
    }  # fmt: skip


def _settings(meta: Mapping[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {k: tokens[i] for k, n in keys.items() if (i := meta.get(f"tokenizer.ggml.{n}_token_id")) is not None}
    template = meta.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **named,
        **({"chat_template": template} if template else {}),
    }
