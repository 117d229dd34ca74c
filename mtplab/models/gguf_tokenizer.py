"""The tokenizer in a GGUF file's metadata -> tokenizer.json and tokenizer_config.json.

Byte-level BPE only ("gpt2" in GGUF's words), and only where the way the text is split before the merges is known: a
tokenizer that splits otherwise loads without a sound and gives the model ids it never saw. For any other take the
tokenizer files of the original model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtplab.errors import ModelError
from mtplab.models import configs, gguf

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
    bos, eos, eot = (_id(meta, n) for n in ("bos", "eos", "eot"))
    if bos is not None:
        out["bos_token_id"] = bos
    ends = [i for i in dict.fromkeys((eos, eot)) if i is not None]
    if ends:
        out["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return out


def _id(meta: Mapping[str, Any], name: str) -> int | None:
    value = meta.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and not configs.whole(value, 0):
        raise gguf.wrong(f"tokenizer.ggml.{name}_token_id", value, "a token id")
    return value


def _listed(meta: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    value = meta.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(type(x) is kind for x in value):
        what = "a list of texts" if kind is str else "a list of whole numbers"
        raise gguf.wrong(f"tokenizer.ggml.{name}", value, f"{what}; {OTHERWISE}")
    return value


def files(meta: Mapping[str, Any]) -> dict[str, Any]:
    """File name -> content. Raises ModelError where the tokenizer is of another kind."""
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        said = configs.shown(kind)
        raise ModelError(
            f"the file's tokenizer is of the kind {said} (tokenizer.ggml.model), not a byte-level BPE; {OTHERWISE}"
        )
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        said = f"{configs.shown(pre)} (tokenizer.ggml.pre)"
        raise ModelError(f"the file's tokenizer splits text like {said}, which is not known here; {OTHERWISE}")
    tokens = _listed(meta, "tokens", str)
    return {"tokenizer.json": _tokenizer(meta, tokens, pre), "tokenizer_config.json": _settings(meta, tokens)}


def _token(meta: Mapping[str, Any], tokens: list[str], name: str) -> tuple[int, str] | None:
    """(id, text) of a special token that the file names, or None."""
    number = _id(meta, name)
    if number is not None and number >= len(tokens):
        said = f"tokenizer.ggml.{name}_token_id is {number} of {len(tokens)} tokens"
        raise ModelError(f"the file's tokenizer is not whole: {said}; {OTHERWISE}")
    return None if number is None else (number, tokens[number])


def _tokenizer(meta: Mapping[str, Any], tokens: list[str], pre: str) -> dict[str, Any]:
    merges = _listed(meta, "merges", str)
    kinds = _listed(meta, "token_type", int) if "tokenizer.ggml.token_type" in meta else [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(
            f"the file has {len(tokens)} tokens but {len(kinds)} of tokenizer.ggml.token_type; {OTHERWISE}"
        )
    vocab = {t: i for i, t in enumerate(tokens)}
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
            "vocab": vocab,
            "merges": [_merge(m, vocab) for m in merges],
        },
    }


def _merge(merge: str, vocab: Mapping[str, int]) -> list[str]:
    """The two tokens that a merge joins; they and what they make must be tokens of the vocabulary."""
    parts = merge.split(" ")
    if len(parts) != 2:
        raise ModelError(f"the file's tokenizer has the merge {merge!r}, which is not two tokens; {OTHERWISE}")
    unknown = next((t for t in (*parts, "".join(parts)) if t not in vocab), None)
    if unknown is not None:
        raise ModelError(f"the file's tokenizer has the merge {merge!r}, but no token {unknown!r}; {OTHERWISE}")
    return parts


def _beginning(meta: Mapping[str, Any], tokens: list[str], pre: str) -> dict[str, Any] | None:
    """The beginning-of-text token before every text, where the model wants it."""
    wanted = meta.get("tokenizer.ggml.add_bos_token", pre in WHOLE_FIRST)
    if type(wanted) is not bool:
        raise gguf.wrong("tokenizer.ggml.add_bos_token", wanted, "true or false")
    if not wanted:
        return None
    found = _token(meta, tokens, "bos")
    if found is None:
        raise ModelError(
            f"the file's tokenizer begins texts with a token but has no tokenizer.ggml.bos_token_id; {OTHERWISE}"
        )
    number, bos = found
    first, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    table = {bos: {"id": bos, "ids": [number], "tokens": [bos]}}
    return {
        "type": "TemplateProcessing", "single": [first, text], "pair": [first, text, second], "special_tokens": table
    }  # fmt: skip


def _settings(meta: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {k: found[1] for k, n in keys.items() if (found := _token(meta, tokens, n)) is not None}
    template = meta.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise gguf.wrong("tokenizer.chat_template", template, f"text; {OTHERWISE}")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **named,
        **({"chat_template": template} if template else {}),
    }
