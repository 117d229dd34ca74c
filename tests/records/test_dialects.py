"""The golden trace as other systems would print it."""

from __future__ import annotations

import re

import pytest
from record_builders import golden, plain, request

from mtplab.errors import RequestError
from mtplab.records.dialects import DIALECTS, translate

GOLDEN = {
    "vllm": [2.5, 0.5, [0.75, 0.5, 0.25]],
    "sglang": [2.5, 0.625, 0.5],
    "omlx": [2 / 3],
    "llamacpp": [0.5, 2.5, [0.75, 0.5, 0.25]],
    "gptfast": [1.5, [0.25, 0.25, 0.25, 0.25]],
    "mlxlm": [0.6],
}
SYSTEM = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "omlx": "oMLX",
    "llamacpp": "llama.cpp",
    "gptfast": "gpt-fast",
    "mlxlm": "mlx-lm",
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_golden_trace(dialect):
    assert [e.value for e in translate([golden()], dialect)] == [pytest.approx(x) for x in GOLDEN[dialect]]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_label_names_its_system_and_every_entry_its_definition(dialect):
    for entry in translate([golden()], dialect):
        assert entry.label.startswith(SYSTEM[dialect])
        assert "/" in entry.definition or "share" in entry.definition
        assert not re.search("speedup|lossless", entry.label + entry.definition)
        assert not re.search("acceptance (rate|length)", entry.definition)  # only behind a system's name


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d != "mlxlm"])
def test_nothing_proposed_is_null(dialect):
    assert {e.value for e in translate([plain(5)], dialect)} == {None}


def test_vllm_divides_a_position_by_all_drafting_passes_and_survival_does_not():
    mixed = [request([(1, 1), (1, 0), (3, 3), (3, 1), (0, 0)])]
    length, share, per_position = (e.value for e in translate(mixed, "vllm"))
    assert length == 1 + 5 / 4  # the pass without a draft is not a draft
    assert share == 5 / 8
    assert per_position == [0.75, 0.25, 0.25]  # survival: 0.75, 0.5, 0.5


def test_mlxlm_counts_the_first_token_which_no_draft_made():
    assert translate([request([(3, 3)])], "mlxlm")[0].value == 3 / 5


def test_an_unknown_dialect_is_refused_with_the_known_ones():
    with pytest.raises(RequestError, match=r"'trtllm'.*vllm.*mlxlm"):
        translate([golden()], "trtllm")
