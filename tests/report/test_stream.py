"""Text as it appears: stop strings, colours, control characters."""

from __future__ import annotations

import re

import pytest

from mtplab.records.types import Prefill, Request, Verify
from mtplab.report.roles import request_roles
from mtplab.report.stream import Painter, statistics_line

MS = 1_000_000


class Letters:
    """A tokenizer's stream in which token i is the text at place i of a list; None waits for the next one."""

    def __init__(self, texts):
        self.texts, self.waiting = texts, ""

    def add(self, token):
        text = self.texts[token]
        if text is None:
            return ""
        return text

    def flush(self):
        return self.waiting


def prefill(token=0, cut=None):
    return Prefill(5, 0, 8, 1, 1, token, cut, 0, 2 * MS)


def verify(tokens, accepted, proposed, *, cut=None, emitted=None, position=1, end=4):
    emitted = len(tokens) if emitted is None else emitted
    drafts = tuple(tokens[:accepted]) + (9,) * (proposed - accepted)
    return Verify(
        0, position, proposed, proposed, accepted, emitted, cut, 5, 6, drafts, tuple(tokens), 2 * MS, end * MS
    )


def show(painter, *records):
    return "".join(painter.feed(r) for r in records)


def plain(text):
    return re.sub(r"\x1b\[\d*m", "", text)


def test_roles_tell_drafts_from_the_models_own_tokens():
    passes = (verify([1, 2, 3], 2, 2), verify([4, 5], 1, 3), verify([6], 0, 0))
    request = Request("0", "", prefill(), passes, "cap")
    assert request_roles(request) == ["first", "draft", "draft", "bonus", "draft", "correction", "step"]


def test_a_cut_inside_the_drafts_leaves_only_drafts():
    request = Request("0", "", prefill(), (verify([1, 2, 3], 2, 2, cut="eos", emitted=1),), "eos")
    assert request_roles(request) == ["first", "draft"]


def test_colours_mark_roles_and_are_always_closed():
    painter = Painter(Letters(list("abcdef")), colour=True)
    text = show(painter, prefill(), verify([1, 2, 3], 2, 2), verify([4, 5], 1, 3, cut="cap"))
    assert plain(text) == "abcdef"
    assert "\x1b[32mbc\x1b[0m\x1b[36md\x1b[0m" in text and "\x1b[33mf\x1b[0m" in text
    assert text.count("\x1b[0m") == len(re.findall(r"\x1b\[3\dm", text))


def test_without_colours_the_text_is_bare():
    assert show(Painter(Letters(list("abc"))), prefill(), verify([1, 2], 1, 1)) == "abc"


@pytest.mark.parametrize("texts", [["a", "b", "ST", "OPx"], ["a", "b", "S", "TOP"], ["a", "bSTOP", "", ""]])
def test_a_stop_string_never_shows_not_even_its_beginning(texts):
    painter = Painter(Letters(texts), stop=("STOP",))
    parts = [painter.feed(prefill()), painter.feed(verify([1, 2, 3], 2, 2, cut="stop"))]
    assert "".join(parts) == "ab" == painter.text


def test_the_beginning_of_a_stop_string_waits_for_the_next_pass():
    painter = Painter(Letters(["ab", "ST", "OP"]), stop=("STOP",))
    parts = [painter.feed(r) for r in (prefill(), verify([1], 0, 0), verify([2], 0, 0, cut="stop"))]
    assert "".join(parts) == "ab" and "S" not in "".join(parts[:2])


def test_the_beginning_of_a_stop_string_shows_once_it_is_none():
    painter = Painter(Letters(["x", "ST", "ay", "!"]), stop=("STOP",))
    assert show(painter, prefill(), verify([1, 2], 1, 1), verify([3], 0, 0, cut="cap")) == "xSTay!"


def test_the_earliest_of_several_stop_strings_counts():
    painter = Painter(Letters(["one ", "two ", "three"]), stop=("three", "two"))
    assert show(painter, prefill(), verify([1, 2], 1, 1, cut="stop")) == "one "


def test_control_characters_cannot_steer_a_terminal():
    painter = Painter(Letters(["a\x1b[2J", "\x07\n\tb\x9b", "\x7f"]), safe=True)
    text = show(painter, prefill(), verify([1, 2], 1, 1, cut="cap"))
    assert text == "a\u241b[2J\u2407\n\tb\ufffd\u2421"


def test_the_statistics_line_leaves_out_what_is_not_defined():
    line = statistics_line(Request("0", "", prefill(cut="cap"), (), "cap", {"arm": "depth2"}))
    assert line == "depth2 | 1 tokens | prefill 5 tokens in 2 ms | ended by token cap"
    full = Request("0", "", prefill(), (verify([1, 2, 3], 2, 2, cut="cap"),), "cap", {"arm": "depth2"})
    assert "draft_acceptance@2 1.00" in statistics_line(full) and "1500.0 tok/s" in statistics_line(full)
