"""The rows of a sweep: complete, JSON-clean, and refusing what would mislead."""

from __future__ import annotations

import json
import math

import pytest
from record_builders import plain, request

from mtplab.errors import RequestError
from mtplab.records.statistics import NO_DIFFERENCE
from mtplab.records.summary import ONE_AFTER_THE_OTHER, summarize

ISSUE_KEYS = {
    *("corpus", "arm", "prompts", "rounds", "tokens", "tok_s", "tpot_ratio", "e2e_ratio", "tokens_per_verify"),
    *("accepted_per_verify", "draft_acceptance", "loop_share", "conditional", "survival", "mean_depth"),
    *("predicted_ratio", "equal_prompts", "first_divergence", "equal_through"),
}
COSTS = {"verify_ms": {"1": 4.0, "2": 4.4}, "draft_ms": {"1": 0.4}, "host_ms": 0.0}


def block(arm, ms, *, prompts=8, rounds=1, start=None, per_round=None, **kwargs):
    """`prompts` x `rounds` requests of one arm. ms: per pass; start(round) and per_round(round) script the machine."""
    made = []
    for r in range(rounds):
        at = start(r) if start else r * 10_000.0
        for i in range(prompts):
            slow = per_round(r) if per_round else 1.0
            settings = {"arm": arm, "round": r, "mode": "greedy"} | kwargs.get("settings", {})
            options = {k: v for k, v in kwargs.items() if k not in ("settings", "passes")}
            passes = kwargs.get("passes", [(0, 0)] * 16)
            made.append(
                request(passes, id=f"p{i}", pass_ms=ms * (1 + i / 10) * slow, start_ms=at + i, **options, **settings)
            )
    return made


def two_arms(**kwargs):
    """baseline and depth1: the same 17 tokens, 8 passes of 2 tokens at 5 ms against 16 of one at 4 ms."""
    return {
        "baseline": block("baseline", 4, rounds=2, **kwargs),
        "depth1": block("depth1", 5, rounds=2, start=lambda r: r * 10_000 + 5_000, passes=[(1, 1)] * 8, **kwargs),
    }


def test_a_row_has_every_key_and_the_values_of_the_records():
    base, row = summarize(two_arms(), costs=COSTS)
    assert set(row) >= ISSUE_KEYS and set(row) == set(base)
    assert (row["corpus"], row["arm"], row["mode"]) == ("novel", "depth1", "greedy")
    assert (row["prompts"], row["rounds"], row["tokens"]) == (8, 2, 8 * 2 * 17)
    assert row["tpot_ratio"]["value"] == pytest.approx(1.6)
    assert row["e2e_ratio"]["value"] < 1.6  # the prefill is the same
    assert row["tokens_per_verify"]["value"] == row["tokens_per_verify"]["low"] == 2.0
    assert (row["draft_acceptance"], row["draft_acceptance_depth"]) == (1.0, "1")
    assert row["predicted_ratio"] == pytest.approx(2 / 1.2)
    assert (row["equal_prompts"], row["first_divergence"], row["equal_through"]) == (8, None, 17)
    assert row["reproducible"] is True and row["marked"] is False
    assert row["verdict"] == "faster" and row["order"] == "interleaved"


def test_the_baseline_row_claims_nothing_about_itself():
    base = summarize(two_arms())[0]
    assert base["tpot_ratio"]["value"] == 1.0 and base["tpot_ratio"]["low"] is None
    assert base["draft_acceptance"] is base["survival"] is base["verdict"] is base["predicted_ratio"] is None
    assert base["tokens_per_verify"]["value"] == 1.0


@pytest.mark.parametrize(
    "arms",
    [
        two_arms(),
        {"baseline": []},
        {"depth1": two_arms()["depth1"]},
        {"baseline": block("baseline", 4, passes=[]), "depth1": block("depth1", 4, passes=[(1, 1)])},
        {"baseline": block("baseline", 0), "depth1": block("depth1", 0)},
    ],
)
def test_rows_are_json_without_nan(arms):
    json.dumps(summarize(arms, costs=COSTS), allow_nan=False)


def test_no_forbidden_word_is_a_key():
    for row in summarize(two_arms()):
        assert not {"acceptance_rate", "acceptance_length", "speedup", "lossless"} & set(row)


def test_without_a_baseline_nothing_is_compared_and_it_says_so():
    (row,) = summarize({"depth1": two_arms()["depth1"]})
    assert row["tpot_ratio"]["value"] is row["equal_prompts"] is row["verdict"] is None
    assert row["tokens_per_verify"]["value"] == 2.0
    assert "the baseline did not run" in row["warnings"]


# Equality ------------------------------------------------------------------------------------------------------


def with_tokens(arm, streams, **kwargs):
    return [
        plain(len(t) - 1, id=f"p{i}", first=t[0], tokens=t[1:], arm=arm, mode="greedy", **kwargs)
        for i, t in enumerate(streams)
    ]


def test_equality_is_reported_by_prompt_with_the_first_divergence():
    base = with_tokens("baseline", [range(30), range(30), range(30)])
    arm = with_tokens("depth1", [range(30), [*range(12), *range(50, 68)], [*range(20), *range(50, 60)]])
    row = summarize({"baseline": base, "depth1": arm})[1]
    assert (row["equal_prompts"], row["first_divergence"], row["equal_through"]) == (1, 12, 12)
    assert row["divergence_curve"] == [[12, pytest.approx(2 / 3)], [20, pytest.approx(1 / 3)]]


def test_an_arm_that_stops_early_by_itself_is_not_equal():
    base, arm = with_tokens("baseline", [range(30)]), with_tokens("depth1", [range(10)], finish="stop")
    assert summarize({"baseline": base, "depth1": arm})[1]["first_divergence"] == 10


def test_an_output_that_ended_equal_bounds_no_claim():
    streams = [range(30), range(5)]
    arms = {}
    for name in ("baseline", "depth1"):
        capped, ended = with_tokens(name, streams), with_tokens(name, streams, finish="eos")
        arms[name] = [capped[0], ended[1]]
    assert summarize(arms)[1]["equal_through"] == 30


def test_reproducible_is_reported_apart_from_equal():
    base = with_tokens("baseline", [range(30)], round=0) + with_tokens("baseline", [range(30)], round=1)
    other = [*range(12), *range(50, 68)]
    steady = with_tokens("depth1", [other], round=0) + with_tokens("depth1", [other], round=1)
    wobbly = with_tokens("depth2", [range(30)], round=0) + with_tokens("depth2", [other], round=1)
    rows = summarize({"baseline": base, "depth1": steady, "depth2": wobbly})
    assert [r["reproducible"] for r in rows] == [True, True, False]
    assert [r["equal_prompts"] for r in rows] == [1, 0, 1]
    assert "the rounds of one prompt gave different tokens" in rows[2]["warnings"]


def test_sampled_streams_are_not_compared():
    settings = {"settings": {"mode": "sampled"}}
    row = summarize(two_arms(**settings))[1]
    assert row["mode"] == "sampled"
    assert row["equal_prompts"] is row["first_divergence"] is row["equal_through"] is None
    assert row["tpot_ratio"]["value"] == pytest.approx(1.6)


def test_the_mode_follows_from_the_temperature_where_it_is_not_recorded():
    assert summarize({"baseline": [plain(3, temp=0.8)]})[0]["mode"] == "sampled"
    assert summarize({"baseline": [plain(3, temp=0.0)]})[0]["mode"] == "greedy"


def test_sampled_rounds_with_other_seeds_are_no_test_of_reproducibility():
    runs = [plain(3, tokens=[r, 1, 2], temp=0.8, seed=r, round=r) for r in range(2)]
    assert summarize({"baseline": runs})[0]["reproducible"] is None
    again = [plain(3, tokens=[r, 1, 2], temp=0.8, seed=4, round=r) for r in range(2)]
    assert summarize({"baseline": again})[0]["reproducible"] is False


# Loops ---------------------------------------------------------------------------------------------------------


def test_a_looping_arm_is_marked():
    base = [plain(23, first=0, tokens=[i % 8 for i in range(1, 24)])]
    row = summarize({"baseline": base})[0]
    assert row["loop_share"] == pytest.approx(9 / 17) and row["marked"] is True
    assert any("0.53" in w for w in row["warnings"])


# Refusals ------------------------------------------------------------------------------------------------------


def test_a_warm_prefix_in_one_arm_is_refused_with_both_counts():
    with pytest.raises(RequestError, match=r"p0 had 0 .*cache in baseline and 16 in depth1"):
        summarize({"baseline": [plain(4)], "depth1": [plain(4, cached=16)]})


def test_a_warm_prefix_from_the_second_round_on_is_refused_too():
    warm = [plain(4, round=0), plain(4, round=1, cached=16)]
    with pytest.raises(RequestError, match=r"0/16 prompt tokens from a cache"):
        summarize({"baseline": warm, "depth1": [plain(4)]})


def test_an_equally_warm_prefix_is_fine():
    rows = summarize({"baseline": [plain(4, cached=16)], "depth1": [plain(4, cached=16)]})
    assert rows[1]["tpot_ratio"]["value"] == pytest.approx(1.0)


def test_one_id_with_two_prompts_is_refused():
    with pytest.raises(RequestError, match="20 prompt tokens in baseline and 21 in depth1"):
        summarize({"baseline": [plain(4)], "depth1": [plain(4, prompt_tokens=21)]})


@pytest.mark.parametrize(
    ("other", "what"), [({"corpus": "code"}, "corpus.*code, novel"), ({"temp": 1.0}, "mode.*greedy, sampled")]
)
def test_corpora_and_modes_do_not_mix(other, what):
    with pytest.raises(RequestError, match=what):
        summarize({"baseline": [plain(4)], "depth1": [plain(4, **other)]})


def test_a_request_counted_twice_is_refused():
    with pytest.raises(RequestError, match="prompt p0 in round 1 twice"):
        summarize({"baseline": [plain(4, round=1), plain(4, round=1)]})


def test_prompts_of_one_side_only_are_counted_not_mixed_in():
    arms = {"baseline": block("baseline", 4), "depth1": block("depth1", 2, prompts=6)}
    row = summarize(arms)[1]
    assert row["unpaired"] == 2 and row["tpot_ratio"]["n"] == 6
    assert any(w.startswith("2 prompts") for w in row["warnings"])


def test_unequal_work_is_said_beside_the_latency_ratio():
    row = summarize({"baseline": [plain(8)], "depth1": [plain(4)]})[1]
    assert any("e2e_ratio compares unequal work" in w for w in row["warnings"])


# Order and drift -----------------------------------------------------------------------------------------------

SLOTS = 1_000_000.0  # ms between trials


def machine_slows(order, *, step=0.1):
    """Two identical arms A and B run in `order`; every later trial is slower by `step` of the first."""
    arms = {"A": [], "B": []}
    for slot, name in enumerate(order):
        turn = len(arms[name])
        arms[name].append(
            block(name, 4, start=lambda _: slot * SLOTS, per_round=lambda _: 1 + slot * step, settings={"round": turn})  # noqa: B023
        )
    return {name: [r for part in parts for r in part] for name, parts in arms.items()}


@pytest.mark.parametrize("order", ["AABB", "AAABBB", "BBAA"])
def test_arms_that_ran_one_after_the_other_have_no_winner(order):
    row = summarize(machine_slows(order), baseline="A")[1]
    assert abs(math.log(row["tpot_ratio"]["value"])) > 0.1  # the false difference is there
    assert row["verdict"] == ONE_AFTER_THE_OTHER
    assert "the arm and the baseline ran one after the other" in row["warnings"]


def test_the_abba_order_cancels_the_drift():
    row = summarize(machine_slows("ABBA"), baseline="A")[1]
    assert row["tpot_ratio"]["value"] == pytest.approx(1.0)
    assert row["verdict"] == NO_DIFFERENCE and row["order"] == "interleaved"


def test_a_slowing_machine_is_flagged_in_either_order():
    for order in ("AAAAABBBBB", "ABBAABBAAB"):
        row = summarize(machine_slows(order), baseline="A")[1]
        assert row["drift_flag"] and row["drift"]["own"]["rho"] > 0.9


def test_an_arm_that_loses_ground_by_the_round_is_flagged():
    arms = {
        "baseline": block("baseline", 4, rounds=5),
        "depth1": block("depth1", 4, rounds=5, start=lambda r: r * 10_000 + 5_000, per_round=lambda r: 1 + r / 20),
    }
    row = summarize(arms)[1]
    assert row["drift"]["difference"]["flag"] and row["drift"]["difference"]["rho"] < -0.9


def test_a_steady_machine_is_not_flagged():
    row = summarize(two_arms())[1]
    assert row["drift_flag"] is False


def test_a_difference_that_an_arm_shows_against_itself_is_no_difference():
    arms = {
        "baseline": block("baseline", 4, rounds=4, per_round=[1.0, 1.1, 1.1, 1.0].__getitem__),
        "depth1": block(
            "depth1", 3.9, rounds=4, start=lambda r: r * 10_000 + 5_000, per_round=[1.1, 1.1, 1.0, 1.0].__getitem__
        ),
    }
    row = summarize(arms)[1]
    assert not row["tpot_ratio"]["low"] <= 1 <= row["tpot_ratio"]["high"]
    assert row["verdict"] == NO_DIFFERENCE
