"""Stops, prompt lookup, prefill and prompts that are wrong."""

from __future__ import annotations

import helpers
import mlx.core as mx
import pytest
import tiny

from mtplab.decode.drafters.simple import NgramDrafter
from mtplab.decode.prefill import check_prompt
from mtplab.decode.settings import Settings
from mtplab.decode.stopping import Stops
from mtplab.errors import ModelError, RequestError


def text(ids):
    return "".join(map(chr, ids))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_stop_strings_across_blocks(size):
    words, stops = [ord(c) for c in "abracadabra"], Stops(Settings(stop=("cad", "zzz")), decode=text)
    seen = []
    for begin in range(0, len(words), size):
        n, cut = stops.cut(words[begin : begin + size])
        seen += words[begin : begin + n]
        if cut:
            break
    assert text(seen) == "abracad" and cut == "stop"


def test_legitimate_repetition_is_not_cut():
    stops = Stops(Settings(max_tokens=1000, stop=("ab!",)), decode=text)
    for _ in range(100):
        assert stops.cut([ord("a"), ord("b")]) == (2, None)


def test_eos_before_stop_before_cap():
    stops = Stops(Settings(max_tokens=2, stop=("b",)), frozenset([97, 98]), decode=text)
    assert stops.cut([98, 97]) == (1, "eos")
    assert Stops(Settings(max_tokens=2, ignore_eos=True), frozenset([97])).cut([97, 97, 97]) == (2, "cap")


def test_prompt_lookup_follows_the_longest_latest_suffix():
    drafter = NgramDrafter(longest=3)
    drafter.begin([1, 2, 3, 9, 1, 2, 3, 8, 5, 2, 3])
    assert drafter.draft(3, 1).tokens.tolist() == [8, 5, 2]  # (2, 3) occurred last before the 8
    drafter.observe([9], None, 0)
    assert drafter.draft(2, 2).tokens.tolist() == [1, 2]  # (2, 3, 9) is longer than any later match
    drafter.observe([77], None, 0)
    assert drafter.draft(2, 3) is None
    assert drafter.draft(2, 3) is None, "asking changes nothing"


def test_prompt_lookup_of_a_loop_and_of_one_token():
    drafter = NgramDrafter()
    drafter.begin([4])
    assert drafter.draft(3, 1) is None
    drafter.observe([4, 4], None, 0)
    assert drafter.draft(3, 1).tokens.tolist() == [4]


@pytest.mark.parametrize("prompt, message", [([], "empty"), ([3, -1], "-1"), ([97], "97")])
def test_wrong_prompts(prompt, message):
    with pytest.raises(RequestError, match=message):
        check_prompt(prompt, vocab=97)


@pytest.mark.parametrize("kind", ["llama", "mimo", "qwen3_5", "gemma3_text"])
def test_an_id_past_the_embedding_is_refused(load, kind):
    """MLX would read whatever memory comes after the table: a tokenizer of another model gave NaN now and then."""
    target = load(kind).target
    assert target.vocab == 97
    with pytest.raises(RequestError, match="prompt token 97 is not an id of this model's vocabulary of 97"):
        helpers.run_baseline(target, [1, 97, 2], Settings(max_tokens=3))


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "gemma3_text"])
def test_prefill_chunks_make_no_difference_and_are_recorded(load, kind):
    target, prompt = load(kind).target, tiny.prompt(3, 30)
    outputs = set()
    for step in (1, 7, 2048):
        records = helpers.run_baseline(target, prompt, Settings(max_tokens=20, prefill_step=step))
        assert records[0].step == step and records[0].forwards == -(-29 // step) + 1
        outputs.add(tuple(helpers.tokens_of(records)))
    assert len(outputs) == 1


def test_nan_logits_are_an_error_not_a_token(load):
    loaded = load("llama")
    model = loaded.target.model
    kept = model.lm_head.weight
    try:
        model.lm_head.weight = kept * float("nan")
        with pytest.raises(ModelError, match="NaN"):
            helpers.run_baseline(loaded.target, [1, 2], Settings(max_tokens=3))
    finally:
        model.lm_head.weight = kept
    assert mx.isfinite(kept).all().item()


def test_a_record_counts_rows_and_bursts_share_a_time(load):
    target, prompt = load("llama").target, tiny.prompt(3, 9)
    future = helpers.tokens_of(helpers.run_baseline(target, prompt, Settings(max_tokens=30)))
    from mtplab.decode.drafters.simple import OracleDrafter

    records = list(helpers.run_speculative(target, prompt, Settings(max_tokens=30), OracleDrafter(future), 3))
    rows = len(prompt)
    for r in records[1:]:
        assert r.cache_before == rows and r.cache_after == rows + r.emitted
        assert r.tokens[: r.accepted] == r.drafts[: r.accepted] and len(r.tokens) == r.accepted + 1
        assert r.start_ns <= r.end_ns
        rows = r.cache_after
