"""The equality oracle: on the reference BLAS every arm is the baseline, token for token and state for state."""

from __future__ import annotations

import itertools

import helpers
import pytest
import tiny

from mtplab.decode.drafters.mtp import MTPDrafter
from mtplab.decode.drafters.simple import NgramDrafter, OracleDrafter, ScriptedDrafter
from mtplab.decode.policy import AdaptiveDepth, ReplayDepth
from mtplab.decode.selection import Draws
from mtplab.decode.settings import Settings

KINDS = ["llama", "mimo", "qwen3_5", "gemma3_text"]
# gemma3_text has a sliding window of 16: prompts of 6 and 40 cross it during and before generation.
LENGTHS = {"llama": (9,), "mimo": (9,), "qwen3_5": (9,), "gemma3_text": (6, 40)}


def cases():
    return [(kind, n) for kind in KINDS for n in LENGTHS[kind]]


def patterns(k: int) -> list[list[int]]:
    """Every pair of accepted counts for k <= 3; above, every count in two orders."""
    if k <= 3:
        return [list(p) for p in itertools.product(range(k + 1), repeat=2)]
    return [list(range(k + 1)), list(range(k, -1, -1)), [k], [0]]


@pytest.mark.parametrize("kind, length", cases())
@pytest.mark.parametrize("k", range(9))
def test_every_acceptance_pattern_gives_the_baseline(load, kind, length, k):
    target, settings, prompt = load(kind).target, Settings(max_tokens=40), tiny.prompt(3, length)
    expected = helpers.tokens_of(helpers.run_baseline(target, prompt, settings))
    assert len(expected) == 40
    future = helpers.tokens_of(helpers.run_baseline(target, prompt, Settings(max_tokens=60)))
    for pattern in patterns(k):
        drafter = ScriptedDrafter(future, pattern, tiny.VOCAB)
        records = list(helpers.run_speculative(target, prompt, settings, drafter, k))
        assert helpers.tokens_of(records) == expected, pattern
        for s, r in enumerate(records[1:-1]):
            if k:
                assert r.accepted == min(pattern[s % len(pattern)], k), "the script was played"


@pytest.mark.parametrize("kind, length", cases())
@pytest.mark.parametrize("k", [1, 2, 3])
def test_cache_after_every_pass_equals_a_serial_run(load, kind, length, k):
    target, settings, prompt = load(kind).target, Settings(max_tokens=24), tiny.prompt(5, length)
    future = helpers.tokens_of(helpers.run_baseline(target, prompt, Settings(max_tokens=40)))
    serial = helpers.SerialStates(target, prompt + future)
    for pattern in ([0], [k], [1, 0], [k, 0, 1]):
        cache = target.new_cache()
        drafter = ScriptedDrafter(future, pattern, tiny.VOCAB)
        for record in helpers.run_speculative(target, prompt, settings, drafter, k, cache=cache):
            serial.check(cache)
            if hasattr(record, "cache_after"):
                assert record.cache_after == cache.length == record.cache_before + record.emitted


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_depths_and_every_depth_change(load, kind):
    target, settings, prompt = load(kind).target, Settings(max_tokens=60), tiny.prompt(4, 9)
    expected = helpers.tokens_of(helpers.run_baseline(target, prompt, settings))
    depths = [0, 1, 0, 0, 3, 2, 0, 0, 0, 1, 1, 3, 0, 2] * 4
    drafter = ScriptedDrafter(expected + [1] * 9, [1, 0, 2, 3], tiny.VOCAB)
    cache = target.new_cache()
    records = list(helpers.run_speculative(target, prompt, settings, drafter, ReplayDepth(depths), cache=cache))
    assert helpers.tokens_of(records) == expected
    assert [r.depth for r in records[1:]] == depths[: len(records) - 1]
    assert sum(r.emitted for r in records[1:]) + 1 == 60


@pytest.mark.parametrize("kind", ["mimo", "qwen3_5"])
@pytest.mark.parametrize("history", ["verified", "drafted", "none"])
@pytest.mark.parametrize("step", [1, 7, 2048])
def test_the_models_own_head_at_every_history_and_chunk(load, kind, history, step):
    loaded = load(kind)
    settings, prompt = Settings(max_tokens=40, prefill_step=step), tiny.prompt(8, 23)
    expected = helpers.tokens_of(helpers.run_baseline(loaded.target, prompt, Settings(max_tokens=40)))
    for policy in (1, 2, 3, AdaptiveDepth(3)):
        drafter = MTPDrafter(loaded.head, settings, Draws(0, 0), history=history)
        records = list(helpers.run_speculative(loaded.target, prompt, settings, drafter, policy))
        assert helpers.tokens_of(records) == expected


@pytest.mark.parametrize("layers", [2, 3])
def test_a_head_of_several_layers(load, layers):
    loaded = load("mimo", build={"head_layers": layers})
    settings, prompt = Settings(max_tokens=40), tiny.prompt(8, 12)
    expected = helpers.tokens_of(helpers.run_baseline(loaded.target, prompt, settings))
    for k in (1, 2, 3, 5):
        drafter = MTPDrafter(loaded.head, settings, Draws(0, 0))
        assert helpers.tokens_of(helpers.run_speculative(loaded.target, prompt, settings, drafter, k)) == expected
        assert all(c.offset <= len(prompt) + 40 for c in drafter.cache)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_eos_and_cap_at_every_position_of_a_block(load, kind, k):
    """Whatever cuts the block wherever: the tokens are the baseline's, and continuing equals a fresh prefill."""
    target, prompt = load(kind).target, tiny.prompt(3, 9)
    future = helpers.tokens_of(helpers.run_baseline(target, prompt, Settings(max_tokens=20)))
    serial = helpers.SerialStates(target, prompt + future)
    for end in range(1, 10):
        eos = frozenset([future[end - 1]])
        stop = future.index(future[end - 1]) + 1
        for settings, ids, cut, length in (
            (Settings(max_tokens=end), frozenset(), "cap", end),
            (Settings(max_tokens=20), eos, "eos", stop),
            (Settings(max_tokens=20, stop=(chr(33 + future[end - 1]),)), frozenset(), "stop", stop),
            (Settings(max_tokens=20, ignore_eos=True), eos, "cap", 20),
        ):
            cache = target.new_cache()
            drafter = OracleDrafter(future + [1] * 9)
            records = list(helpers.run_speculative(target, prompt, settings, drafter, k, eos=ids, cache=cache))
            got = helpers.tokens_of(records)
            assert got == future[:length] and records[-1].cut == cut
            assert got == helpers.tokens_of(helpers.run_baseline(target, prompt, settings, eos=ids))
            assert cache.length - len(prompt) in (length - 1, length)
            serial.check(cache)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_prompt_lookup(load, kind):
    target, settings = load(kind).target, Settings(max_tokens=50)
    prompt = tiny.prompt(3, 6) * 3
    expected = helpers.tokens_of(helpers.run_baseline(target, prompt, settings))
    for k in (1, 3, 8):
        records = list(helpers.run_speculative(target, prompt, settings, NgramDrafter(), k))
        assert helpers.tokens_of(records) == expected
        assert all(r.proposed <= k for r in records[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_prompt(load, kind):
    target, settings = load(kind).target, Settings(max_tokens=12)
    expected = helpers.tokens_of(helpers.run_baseline(target, [5], settings))
    drafter = ScriptedDrafter(expected + [0] * 9, [2, 0], tiny.VOCAB)
    assert helpers.tokens_of(helpers.run_speculative(target, [5], settings, drafter, 3)) == expected


def test_quantized_kv_and_bounded_kv(load):
    """kv_bits and max_kv_size keep the equality; the latter past its size, with the sinks in view."""
    for options in ({"kv_bits": 8, "kv_group_size": 32}, {"max_kv_size": 24}):
        build = {} if "max_kv_size" in options else {"hidden_size": 128}
        target, settings, prompt = (
            load("llama", build=build, **options).target,
            Settings(max_tokens=60),
            tiny.prompt(3, 9),
        )
        expected = helpers.tokens_of(helpers.run_baseline(target, prompt, settings))
        for k, pattern in ((1, [0, 1]), (3, [3, 0, 1, 2]), (3, [0])):
            drafter = ScriptedDrafter(expected + [0] * 9, pattern, tiny.VOCAB)
            assert helpers.tokens_of(helpers.run_speculative(target, prompt, settings, drafter, k)) == expected, options
