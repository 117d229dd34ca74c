"""Intervals: what they must cover, what they must refuse to claim."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtplab.errors import RequestError
from mtplab.records import statistics as s

# Bootstrap -----------------------------------------------------------------------------------------------------


def test_the_bootstrap_divides_sums_again():
    got = s.prompt_bootstrap([90, 1], [100, 10])
    assert got.value == pytest.approx(91 / 110)  # not the mean of 0.9 and 0.1
    assert (got.low, got.high) == pytest.approx((0.1, 0.9))


def test_a_long_prompt_weighs_by_its_length_in_every_resample():
    got = s.prompt_bootstrap([900] + [0] * 19, [1000] + [1] * 19)
    assert got.low == 0.0  # the long prompt was not drawn
    assert got.high > 0.89  # drawn twice or more; a mean of quotients would stay below 0.2


def test_the_same_data_give_the_same_interval():
    x = np.random.default_rng(1).random(30)
    assert s.prompt_bootstrap(x, x + 1) == s.prompt_bootstrap(x, x + 1)


def test_few_prompts_are_said_to_be_few():
    assert "19 prompts" in s.prompt_bootstrap(range(19), [1] * 19).note
    assert s.prompt_bootstrap(range(20), [1] * 20).note is None


def test_one_prompt_has_a_value_and_no_interval():
    got = s.prompt_bootstrap([3], [2])
    assert (got.value, got.low, got.high, got.n) == (1.5, None, None, 1)
    assert "1 prompt" in got.note


def test_nothing_to_divide_is_null_and_json_never_holds_nan():
    assert s.prompt_bootstrap([0, 0], [0, 0]).value is None
    text = json.dumps(s.Interval(math.nan, -math.inf, math.inf, 3).to_json(), allow_nan=False)
    assert json.loads(text) == {"value": None, "low": None, "high": None, "n": 3, "note": None}


def test_prompts_and_their_sums_must_match():
    with pytest.raises(RequestError, match="2 numerators against 3"):
        s.prompt_bootstrap([1, 2], [1, 2, 3])


pairs = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 400)), min_size=2, max_size=40)


@given(pairs)
def test_an_interval_contains_its_value(data):
    got = s.prompt_bootstrap([a for a, _ in data], [b for _, b in data], resamples=200)
    assert got.low <= got.value <= got.high


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=40))
def test_a_paired_ratio_is_a_geometric_mean_inside_its_interval(logs):
    got = s.paired_bootstrap(logs, resamples=200)
    assert got.value == pytest.approx(math.exp(np.mean(logs)))
    assert got.low <= got.value <= got.high
    mirrored = s.paired_bootstrap([-x for x in logs], resamples=200)
    assert mirrored.low == pytest.approx(1 / got.high)  # swapping the arms turns the range over


def dependent_passes(rng, prompts=40, passes=80):
    """accepted [prompts, passes] at K = 1 where each prompt has its own ease; the true share is 0.5."""
    ease = rng.beta(1.2, 1.2, size=(prompts, 1))
    return rng.random((prompts, passes)) < ease


def test_the_prompt_bootstrap_covers_where_an_interval_over_passes_does_not():
    rng = np.random.default_rng(20)
    by_prompt, by_pass, runs = 0, 0, 200
    for _ in range(runs):
        accepted = dependent_passes(rng)
        by_prompt += s.prompt_bootstrap(accepted.sum(1), [accepted.shape[1]] * len(accepted), resamples=500).contains(
            0.5
        )
        by_pass += s.wilson(int(accepted.sum()), accepted.size).contains(0.5)
    assert by_prompt / runs > 0.90
    assert by_pass / runs < 0.55


# Wilson --------------------------------------------------------------------------------------------------------


def test_wilson_against_published_values():
    got = s.wilson(81, 263)  # Newcombe 1998, table I: 0.2553 to 0.3662
    assert (got.low, got.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert s.wilson(0, 10).low == 0.0 and 0.2 < s.wilson(0, 10).high < 0.31
    assert s.wilson(10, 10).high == 1.0
    assert s.wilson(0, 0).value is None


# Kaplan-Meier --------------------------------------------------------------------------------------------------


def test_kaplan_meier_treats_equal_streams_as_censored():
    # Diverged at 2 and at 5; equal through 4 and through 8 tokens.
    steps = s.kaplan_meier([(2, 3), (5, 6), (None, 4), (None, 8)])
    assert [(x.index, x.at_risk, x.diverged) for x in steps] == [(2, 4, 1), (5, 2, 1)]
    assert [x.survival for x in steps] == pytest.approx([0.75, 0.375])


def test_a_stream_compared_up_to_a_token_is_at_risk_at_that_token():
    assert s.kaplan_meier([(3, 4), (None, 4)])[0].at_risk == 2  # index 3 is the fourth token
    assert s.kaplan_meier([(3, 4), (None, 3)])[0].at_risk == 1


def test_no_divergence_is_an_empty_curve():
    assert s.kaplan_meier([(None, 256), (None, 12)]) == []


# Drift ---------------------------------------------------------------------------------------------------------


def rounds_of(values, prompts=4):
    """Every prompt shows the same value in a round, plus a little of its own."""
    rng = np.random.default_rng(3)
    flat = [(r, v + rng.normal(0, 0.01)) for r, v in enumerate(values) for _ in range(prompts)]
    return [r for r, _ in flat], [v for _, v in flat]


def test_a_machine_that_gets_slower_is_flagged():
    got = s.drift(*rounds_of([0.0, 0.1, 0.2, 0.3, 0.4]))
    assert got.flag and got.rho > 0.9 and got.p == pytest.approx(2 / 120)


def test_rounds_without_order_are_not_flagged():
    assert not s.drift(*rounds_of([0.0, 0.4, 0.1, 0.3, 0.2])).flag


def test_one_odd_round_is_not_a_drift_however_many_prompts_show_it():
    # 200 entries agree, but they share one machine state per round: 5 rounds, not 200 proofs.
    assert not s.drift(*rounds_of([0.0, 0.0, 0.0, 0.0, 0.5], prompts=40)).flag


def test_rho_is_spearmans():
    from scipy.stats import spearmanr

    rounds, values = rounds_of([0.0, 0.4, 0.1, 0.3, 0.2])
    assert s.drift(rounds, values).rho == pytest.approx(spearmanr(rounds, values).statistic)


def test_too_few_rounds_cannot_show_drift_and_say_so():
    got = s.drift(*rounds_of([0.0, 0.1, 0.2]))
    assert not got.flag and "3 rounds" in got.note
    assert s.drift([0, 0], [1.0, 2.0]).rho is None
    assert s.drift([], []).rho is None


def test_many_rounds_use_drawn_orders():
    assert s.drift(*rounds_of(np.arange(12) * 0.1)).flag


# Noise and verdicts --------------------------------------------------------------------------------------------


def test_the_noise_floor_is_an_arm_against_itself():
    rng = np.random.default_rng(5)
    ms = {f"p{i}": {r: 10 * math.exp(rng.normal(0, 0.05)) for r in range(4)} for i in range(20)}
    got = s.noise_floor(ms)
    assert got.contains(1.0) and 1.0 < got.high < 1.1


def test_a_steady_drift_is_dealt_to_both_halves():
    ms = {f"p{i}": {r: 10.0 + r for r in range(8)} for i in range(5)}
    assert s.noise_floor(ms).value == pytest.approx(1.0)


def test_one_round_has_no_noise_floor():
    assert s.noise_floor({"a": {0: 1.0}}).value is None


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (s.Interval(1.2, 1.1, 1.3, 8), "faster"),
        (s.Interval(0.8, 0.7, 0.9, 8), "slower"),
        (s.Interval(1.2, 0.9, 1.5, 8), s.NO_DIFFERENCE),
        (s.Interval(1.2, None, None, 1), s.NO_DIFFERENCE),
        (s.Interval(None), None),
    ],
)
def test_a_verdict_needs_a_range_without_one(ratio, expected):
    assert s.verdict(ratio) == expected


def test_a_difference_below_the_noise_floor_is_no_difference():
    ratio = s.Interval(1.02, 1.01, 1.03, 8)
    assert s.verdict(ratio, s.Interval(1.0, 0.99, 1.01, 8)) == "faster"
    assert s.verdict(ratio, s.Interval(1.0, 0.97, 1.01, 8)) == s.NO_DIFFERENCE


def test_two_runs_whose_ranges_overlap_do_not_differ():
    a, b = s.sample_range([10, 11, 12]), s.sample_range([11.5, 13, 14])
    assert s.compare_ranges(a, b) == s.NO_DIFFERENCE
    assert s.compare_ranges(b, s.sample_range([9, 10])) == "first higher"
    assert s.compare_ranges(s.sample_range([9, 10]), b) == "second higher"
    assert s.compare_ranges(a, s.sample_range([])) == s.NO_DIFFERENCE
