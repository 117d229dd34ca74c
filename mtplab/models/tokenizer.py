"""Tokenizers, started fast: `tokenizer.json` through the tokenizers library, transformers only where needed.

transformers costs seconds to import. It is asked for chat templates and for checkpoints without a
`tokenizer.json`; the rest needs the Rust library alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mtplab.errors import ModelError, RequestError
from mtplab.models.headers import read_json


class Stream:
    """Text deltas of a growing token list; an incomplete UTF-8 sequence waits for its last byte."""

    WINDOW = 32

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._tokens, self._shown = tokenizer, [], ""

    def add(self, token: int) -> str:
        """The text that this token completes (may be empty)."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if text.endswith("\ufffd"):
            return ""
        delta, self._shown = text[len(self._shown) :], text
        if len(self._tokens) > self.WINDOW and delta:
            # Start over from a clean boundary: decoding cost stays bounded.
            self._tokens, self._shown = self._tokens[-1:], self._tokenizer.decode(self._tokens[-1:])
        return delta

    def flush(self) -> str:
        """What is left when the stream ends inside a character."""
        return self._tokenizer.decode(self._tokens)[len(self._shown) :]


class Tokenizer:
    """encode, decode, chat, stream, eos_ids of one checkpoint folder."""

    def __init__(self, folder: Path, config: dict[str, Any]):
        self.folder = folder
        self.eos_ids = eos_ids(folder, config)

    @cached_property
    def _fast(self) -> Any:
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            return None
        import tokenizers

        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ModelError(f"{path} is not a readable tokenizer: {error}") from error

    @cached_property
    def _full(self) -> Any:
        import transformers

        try:
            return transformers.AutoTokenizer.from_pretrained(str(self.folder), local_files_only=True)
        except Exception as error:
            raise ModelError(f"{self.folder} has no readable tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens the checkpoint adds by itself."""
        return list(self._fast.encode(text).ids) if self._fast is not None else list(self._full.encode(text))

    def plain(self, text: str) -> list[int]:
        """Token ids of a text from the middle of another: without special tokens around it."""
        tokenizer = self._full if self._fast is None else self._fast
        ids = tokenizer.encode(text, add_special_tokens=False)
        return list(ids if self._fast is None else ids.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        ids = list(tokens)
        if self._fast is not None:
            return self._fast.decode(ids, skip_special_tokens=True)
        return self._full.decode(ids, skip_special_tokens=True)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation under the checkpoint's chat template, ready for the answer."""
        if getattr(self._full, "chat_template", None) is None:
            raise RequestError(f"{self.folder.name} has no chat template; give the prompt as plain text")
        out = self._full.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return list(out)

    def stream(self) -> Stream:
        return Stream(self)


def eos_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """End-of-sequence ids: generation_config.json where it names them, else config.json (top level or text)."""
    text = config.get("text_config")
    sources = [config, text if isinstance(text, dict) else {}]
    generation = folder / "generation_config.json"
    if generation.is_file():
        sources.insert(0, read_json(generation))
    for source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(i) is int for i in ids):
                raise ModelError(f"{folder} has eos_token_id {value!r}; it must be a token id or a list of them")
            return frozenset(ids)
    return frozenset()


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a checkpoint folder, without loading the model."""
    folder = Path(folder)
    return Tokenizer(folder, read_json(folder / "config.json"))
