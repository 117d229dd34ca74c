"""Prompts from any text, and a sentence with the place of the fault for everything that is no corpus."""

from __future__ import annotations

import json
import time

import pytest

from mtplab.errors import RequestError
from mtplab.trials import corpus


class Words:
    """A tokenizer with one token a word (or a run of 100 letters), that keeps count of what it was given."""

    def __init__(self):
        self.characters = 0
        self.words: list[str] = []

    def encode(self, text):
        self.characters += len(text)
        parts = [w[i : i + 100] for w in text.split() for i in range(0, len(w), 100)]
        start = len(self.words)
        self.words += parts
        return list(range(start, start + len(parts)))

    def decode(self, tokens):
        return " ".join(self.words[t] for t in tokens)

    def chat(self, messages):
        return self.encode(" ".join(f"<{m['role']}> {m['content']}" for m in messages) + " <assistant>")


def load(path, *, prompts=3, size=5, room=4, context=1000, tokenizer=None):
    return corpus.load_corpora(
        [str(path)], tokenizer or Words(), prompts=prompts, prompt_tokens=size, room=room, context=context
    )


def lines(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def test_a_long_text_is_cut_at_spread_positions(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"w{i:04d}" for i in range(3000)))
    prompts, notices = load(path)
    assert [len(p.tokens) for p in prompts] == [5, 5, 5] and notices == []
    firsts = [int(p.text.split()[0][1:]) for p in prompts]
    assert firsts[0] == 0 and abs(firsts[1] - 1000) < 5 and abs(firsts[2] - 2000) < 5
    assert all(p.text.split()[0].startswith("w") for p in prompts), "prompts begin with a whole word"
    assert len({p.id for p in prompts}) == 3 and {p.corpus for p in prompts} == {"book"}


def test_windows_never_overlap(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text(" ".join(f"w{i:04d}" for i in range(12)))
    prompts, notices = load(path, prompts=8)
    seen = [w for p in prompts for w in p.text.split()]
    assert len(seen) == len(set(seen)) and len(prompts) == 2
    assert notices == ["corpus 'short' holds 2 prompts of up to 5 tokens, not 8"]


def test_one_line_of_five_megabytes_is_cut_and_not_read_through_the_tokenizer(tmp_path):
    path, tokenizer = tmp_path / "line.txt", Words()
    path.write_text("x" * 5_000_000)
    began = time.monotonic()
    prompts, _ = load(path, prompts=4, size=20, tokenizer=tokenizer)
    assert [len(p.tokens) for p in prompts] == [20] * 4
    assert tokenizer.characters < 50_000 and time.monotonic() - began < 5


def test_a_json_line_of_five_megabytes_is_cut_too(tmp_path):
    tokenizer = Words()
    path = lines(tmp_path / "one.jsonl", {"text": "word " * 1_000_000})
    prompts, _ = load(path, prompts=2, size=20, tokenizer=tokenizer)
    assert [len(p.tokens) for p in prompts] == [20, 20] and tokenizer.characters < 50_000


def test_a_prompt_of_five_megabytes_is_refused_without_tokenizing_it_all(tmp_path):
    tokenizer = Words()
    path = lines(tmp_path / "big.jsonl", {"id": "p", "prompt": "word " * 1_000_000})
    with pytest.raises(RequestError, match=r"'big/p' has \d+ tokens or more but the model's context is 50"):
        load(path, context=50, tokenizer=tokenizer)
    assert tokenizer.characters < 20_000


def test_prompts_are_used_whole_and_ids_are_kept(tmp_path):
    path = lines(tmp_path / "p.jsonl", {"id": "first", "prompt": "a b c d e f g"}, {"prompt": "one"})
    prompts, _ = load(path)
    assert [(p.id, len(p.tokens)) for p in prompts] == [("p/first", 7), ("p/p-0002", 1)]


def test_chat_prompts_go_through_the_template(tmp_path):
    path = lines(tmp_path / "c.jsonl", {"messages": [{"role": "user", "content": "hello there"}]})
    prompts, _ = load(path)
    assert len(prompts[0].tokens) == 4 and prompts[0].text == "hello there"


def test_more_documents_than_prompts_are_spread(tmp_path):
    path = lines(tmp_path / "many.jsonl", *({"id": str(i), "prompt": f"p {i}"} for i in range(100)))
    assert [p.id for p in load(path, prompts=4)[0]] == ["many/0", "many/25", "many/50", "many/75"]


def test_a_line_separator_inside_a_string_does_not_end_a_record(tmp_path):
    path = tmp_path / "u.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert len(load(path)[0]) == 1


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "bom.txt"
    path.write_bytes(b"\xef\xbb\xbfalpha beta")
    assert load(path)[0][0].text == "alpha beta"


@pytest.mark.parametrize("content", [b"", b"  \n\n \t"])
@pytest.mark.parametrize("name", ["e.txt", "e.jsonl"])
def test_an_empty_corpus_is_an_error(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match="is empty; give a file with some text"):
        load(tmp_path / name)


def test_a_wrong_byte_is_named_with_its_offset(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(RequestError, match=r"is not UTF-8: byte 0xe9 at offset 3"):
        load(path)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ('{"prompt": "a"', r"line 2 is not JSON"),
        ('["prompt"]', r"line 2 must be an object"),
        ('{"prompt": "a", "text": "b"}', r"line 2 must be an object with exactly one"),
        ('{"prompt": 7}', r"line 2: 'prompt' must be a string, not int"),
        ('{"messages": "hi"}', r"line 2: 'messages' must be a list"),
        ('{"prompt": "\\ud800"}', r"line 2: 'prompt' holds half a surrogate pair"),
        ("[" * 100_000, r"line 2 is not JSON"),
    ],
)
def test_a_broken_record_is_named_with_its_line(tmp_path, record, words):
    path = lines(tmp_path / "b.jsonl", {"prompt": "fine"}, record)
    with pytest.raises(RequestError, match=words):
        load(path)


def test_one_id_twice_is_an_error(tmp_path):
    path = lines(tmp_path / "d.jsonl", {"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"})
    with pytest.raises(RequestError, match="uses the id '1' twice"):
        load(path)


def test_missing_files_folders_and_unreadable_files(tmp_path):
    with pytest.raises(RequestError, match=r"neither a bundled text .* nor a file"):
        load(tmp_path / "missing.txt")
    with pytest.raises(RequestError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(RequestError, match="cannot be read"):
        load(tmp_path / ("x" * 5000))


def test_two_corpora_of_one_name_would_share_a_row(tmp_path):
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "t.txt", tmp_path / "a" / "t.txt"):
        path.write_text("some words")
    with pytest.raises(RequestError, match="two corpora are called 't'"):
        corpus.load_corpora(
            [str(tmp_path / "t.txt"), str(tmp_path / "a" / "t.txt")],
            Words(),
            prompts=1,
            prompt_tokens=2,
            room=1,
            context=9,
        )


@pytest.mark.parametrize("record", [{"id": "x", "prompt": ""}, {"id": "x", "text": "  "}])
def test_an_empty_prompt_is_named(tmp_path, record):
    path = lines(tmp_path / "e.jsonl", record, {"prompt": "b"})
    with pytest.raises(RequestError, match="prompt 'e/x' is empty"):
        load(path)


def test_a_prompt_longer_than_the_context_is_named_with_both_numbers(tmp_path):
    path = lines(tmp_path / "l.jsonl", {"id": "x", "prompt": "w " * 60})
    with pytest.raises(RequestError, match=r"'l/x' has 60 tokens or more but the model's context is 50; shorten"):
        load(path, context=50)


def test_a_prompt_that_leaves_no_room_is_named_with_all_numbers(tmp_path):
    path = lines(tmp_path / "l.jsonl", {"id": "x", "prompt": "w " * 48})
    with pytest.raises(RequestError, match=r"'l/x' has 48 tokens and 4 are to follow, but .* is 50; lower"):
        load(path, context=50)
    assert len(load(path, context=52)[0]) == 1
