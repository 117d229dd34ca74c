"""Texts -> prompts of token ids, the same ones for every arm.

A corpus is named by a word (a bundled text) or a path (any text file, or JSON lines). Long texts are cut into prompts
of N tokens at positions spread over the whole text, since the first page of a book is unlike the rest of it. Only
windows around those positions are ever tokenized: a file that is one line of 5 MB costs no more than a tidy one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mtplab.errors import RequestError

DATA = Path(__file__).resolve().parent.parent / "data" / "corpora"
LONGEST_TOKEN = 160  # characters; no usual vocabulary has a longer one, so n * 160 characters hold more than n tokens
SAMPLE = 4000  # characters read to learn how many of them a token takes
KEYS = ("text", "prompt", "messages")


class Encoder(Protocol):
    """What a corpus needs from a tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def chat(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `id` is unique within a run; `text` is what was tokenized (or the last chat message)."""

    id: str
    corpus: str
    tokens: tuple[int, ...]
    text: str

    def to_json(self) -> dict[str, Any]:
        digest = hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()[:16]
        return {"id": self.id, "corpus": self.corpus, "sha256": digest, "text": self.text, "tokens": list(self.tokens)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Prompt:
        return cls(data["id"], data["corpus"], tuple(data["tokens"]), data["text"])


@dataclass(frozen=True, slots=True)
class Document:
    """A text to cut prompts from, or (`whole`) a prompt that is used as it stands; chat messages are whole."""

    id: str
    text: str
    whole: bool = False
    messages: tuple[dict[str, str], ...] = ()


def bundled_names() -> list[str]:
    """Names of the texts that ship with mtplab."""
    return sorted(p.stem for p in DATA.glob("*.jsonl"))


def corpus_name(spec: str) -> str:
    """The corpus column of every table: the bundled name, or the file's stem."""
    return spec if spec in bundled_names() else Path(spec).stem


def load_corpora(
    specs: Sequence[str], tokenizer: Encoder, *, prompts: int, prompt_tokens: int, room: int, context: int
) -> tuple[list[Prompt], list[str]]:
    """Prompts of all corpora and the notices a person should see (fewer prompts than asked for).

    `room`: tokens that will be generated after each prompt; prompt + room must fit into `context`.
    Raises RequestError naming the file, line, byte offset or prompt id that is wrong.
    """
    names = [corpus_name(s) for s in specs]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"two corpora are called {name!r}; rename one of the files")
    found, notices = [], []
    for spec, name in zip(specs, names, strict=True):
        documents = read_documents(spec)
        made = list(cut(documents, name, tokenizer, prompts=prompts, size=prompt_tokens, limit=context))
        for prompt in made:
            check_prompt(prompt, room=room, context=context)
        if len(made) < prompts:
            notices.append(f"corpus {name!r} holds {len(made)} prompts of up to {prompt_tokens} tokens, not {prompts}")
        found += made
    return found, notices


def check_utf8(text: str) -> None:
    """A command line may hold any bytes; a prompt may not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("the prompt is not UTF-8; give it in that encoding") from None


def check_prompt(prompt: Prompt, *, room: int, context: int) -> None:
    """Refuse a prompt that is empty or does not leave room for the tokens to generate."""
    count = len(prompt.tokens)
    if count == 0:
        raise RequestError(f"prompt {prompt.id!r} is empty; give at least one token")
    if count > context:
        raise RequestError(
            f"prompt {prompt.id!r} has {count} tokens or more but the model's context is {context}; "
            "shorten the prompt or lower --prompt-tokens"
        )
    if count + room > context:
        raise RequestError(
            f"prompt {prompt.id!r} has {count} tokens and {room} are to follow, but the model's context is {context}; "
            "lower --max-tokens or --prompt-tokens"
        )


def read_documents(spec: str) -> list[Document]:
    """The documents of a bundled corpus, a text file or a JSON lines file (suffix .jsonl or .ndjson)."""
    path = DATA / f"{spec}.jsonl" if spec in bundled_names() else Path(spec).expanduser()
    text = read_text(path, spec)
    if path.suffix in (".jsonl", ".ndjson"):
        documents = list(_parse_lines(text, path))
        _refuse_doubles(documents, path)
    else:
        documents = [Document(path.stem, text)] if text.strip() else []
    if not documents:
        raise RequestError(f"corpus {spec!r} is empty; give a file with some text in it")
    return documents


def read_text(path: Path, spec: str, what: str = "corpus") -> str:
    """A file's text, strictly UTF-8; a byte order mark is dropped. `what` it is to whoever asked: "corpus", "file"."""
    corpus = what == "corpus"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        names = ", ".join(bundled_names()) or "none"
        absent = f"is neither a bundled text ({names}) nor a file" if corpus else "does not exist; name a text file"
        raise RequestError(f"{what} {spec!r} {absent}") from None
    except IsADirectoryError:
        kinds = "a text file or a .jsonl file" if corpus else "a text file"
        raise RequestError(f"{what} {spec!r} is a folder; name {kinds} in it") from None
    except OSError as error:
        raise RequestError(f"{what} {spec!r} cannot be read: {error.strerror}") from None
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{what} {spec!r} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; convert it first"
        ) from None


def _parse_lines(text: str, path: Path) -> Iterator[Document]:
    # Only "\n" ends a record: str.splitlines would also cut at U+2028 inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            reason = (
                f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deep"
            )
            raise RequestError(f"{where} is not JSON: {reason}") from None
        yield _document(record, f"{path.stem}-{number:04d}", where)


def _document(record: Any, default_id: str, where: str) -> Document:
    keys = [k for k in KEYS if isinstance(record, dict) and k in record]
    if len(keys) != 1:
        raise RequestError(f"{where} must be an object with exactly one of the keys {', '.join(KEYS)}")
    name, value = str(record.get("id", default_id)), record[keys[0]]
    if keys[0] == "messages":
        return Document(name, _chat_text(value, where), whole=True, messages=tuple(value))
    if not isinstance(value, str):
        raise RequestError(f"{where}: {keys[0]!r} must be a string, not {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(f"{where}: {keys[0]!r} holds half a surrogate pair, which no tokenizer accepts") from None
    return Document(name, value, whole=keys[0] == "prompt")


def _chat_text(messages: Any, where: str) -> str:
    right = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not right or not messages:
        raise RequestError(f"{where}: 'messages' must be a list of objects with the strings 'role' and 'content'")
    return messages[-1]["content"]


def _refuse_doubles(documents: list[Document], path: Path) -> None:
    seen: set[str] = set()
    for document in documents:
        if document.id in seen:
            raise RequestError(f"{path} uses the id {document.id!r} twice; ids must be unique")
        seen.add(document.id)


def cut(
    documents: Sequence[Document], corpus: str, tokenizer: Encoder, *, prompts: int, size: int, limit: int
) -> Iterator[Prompt]:
    """At most `prompts` prompts: whole documents as they are, long texts cut into windows of `size` tokens.

    Where there are fewer documents than prompts, each long text gives several windows that do not overlap.
    """
    chosen = spread(documents, prompts)
    shares = [prompts // len(chosen) + (i < prompts % len(chosen)) for i in range(len(chosen))]
    for document, share in zip(chosen, shares, strict=True):
        if document.whole:
            yield _whole(document, corpus, tokenizer, limit)
        else:
            yield from _windows(document, corpus, tokenizer, share, size)


def prompt_id(corpus: str, document: str) -> str:
    """Unique within a run, since corpora have names of their own."""
    return document if document.startswith(f"{corpus}/") else f"{corpus}/{document}"


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` items at evenly spread positions, in order."""
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def _whole(document: Document, corpus: str, tokenizer: Encoder, limit: int) -> Prompt:
    name = prompt_id(corpus, document.id)
    if document.messages:
        return Prompt(name, corpus, tuple(tokenizer.chat(list(document.messages))), document.text)
    # A text that cannot fit need not be tokenized to its end to be refused.
    tokens = tokenizer.encode(document.text[: (limit + 1) * LONGEST_TOKEN])
    return Prompt(name, corpus, tuple(tokens), document.text)


def _windows(document: Document, corpus: str, tokenizer: Encoder, count: int, size: int) -> Iterator[Prompt]:
    text = document.text
    if not text.strip():
        raise RequestError(f"prompt {prompt_id(corpus, document.id)!r} is empty; give at least one token")
    fit = max(1, int(len(text) / (size * _chars_per_token(text, tokenizer))))
    count = min(count, fit)
    for i in range(count):
        start = _word_start(text, i * len(text) // count)
        tokens = _encode_window(text, start, size, tokenizer)
        name = prompt_id(corpus, document.id) + (f"@{start}" if count > 1 else "")
        yield Prompt(name, corpus, tuple(tokens), tokenizer.decode(tokens))


def _chars_per_token(text: str, tokenizer: Encoder) -> float:
    middle = text[max(0, len(text) // 2 - SAMPLE // 2) :][:SAMPLE]
    return max(1.0, len(middle) / max(1, len(tokenizer.encode(middle))))


def _word_start(text: str, start: int) -> int:
    """The next beginning of a word after `start`, if one is near; else `start` itself."""
    if start == 0:
        return 0
    near = text[start : start + 200]
    for i in range(1, len(near)):
        if near[i - 1].isspace() and not near[i].isspace():
            return start + i
    return start


def _encode_window(text: str, start: int, size: int, tokenizer: Encoder) -> list[int]:
    """The first `size` tokens from `start` on (fewer where the text ends), reading no more text than that needs."""
    width = size * 8
    while True:
        tokens = tokenizer.encode(text[start : start + width])
        if len(tokens) > size or start + width >= len(text):
            return tokens[:size]
        width *= 2
