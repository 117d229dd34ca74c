"""The definitions: the golden trace, the rows of the counting cases, and identities that any trace must satisfy."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_builders import golden, plain, request

from mtplab.errors import RequestError
from mtplab.records import metrics as m
from mtplab.records.types import Request

# The golden trace ----------------------------------------------------------------------------------------------


def test_golden_trace():
    r = [golden()]
    c = m.counts(r)
    assert (c.proposed.sum(), c.examined.sum(), c.accepted.sum(), c.emitted.sum()) == (12, 9, 6, 10)
    assert m.emitted_total(r) == len(r[0].tokens) == 10
    assert m.tokens_per_verify(r) == 2.5
    assert m.accepted_per_verify(r) == 1.5
    assert m.emitted_per_verify(r) == 2.5
    assert m.draft_acceptance(r) == (0.5, "3")
    assert m.examined_acceptance(r) == pytest.approx(2 / 3)
    assert m.survival(r) == [0.75, 0.5, 0.25]
    assert m.conditional(r) == pytest.approx([0.75, 2 / 3, 0.5])
    assert m.draft_share(r) == 0.6
    assert m.mean_depth(r) == 3.0


def test_golden_trace_with_eos_at_the_second_draft_of_the_first_pass():
    r = [request([(3, 3)], first=None, emitted_last=2, finish="eos")]
    assert m.counts(r).accepted.tolist() == [3]
    assert m.emitted_total(r) == len(r[0].tokens) == 2
    assert m.tokens_per_verify(r) == 4.0  # before the cut: the drafter was right three times
    assert m.emitted_per_verify(r) == 2.0  # after it: what the user got
    assert m.draft_share(r) == 1.0  # the bonus token was cut off


# Counting cases ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_a_cap_inside_a_block_keeps_accepted_and_emitted_apart(cap):
    passes = [] if cap == 1 else [(3, 3)]
    r = request(passes, emitted_last=cap - 1)
    assert len(r.tokens) == m.emitted_total([r]) == cap
    assert m.counts([r]).accepted.sum() == 3 * len(passes)
    assert m.tokens_per_verify([r]) == (4.0 if passes else None)


def test_all_rejected_is_zero():
    r = [request([(3, 0)] * 4)]
    assert m.draft_acceptance(r).value == 0.0
    assert m.examined_acceptance(r) == 0.0
    assert m.survival(r) == [0.0, 0.0, 0.0]
    assert m.conditional(r) == [0.0, None, None]  # nothing ever reached positions 1 and 2
    assert m.draft_share(r) == 0.0


def test_all_accepted_is_one_at_every_position():
    r = [request([(3, 3)] * 4)]
    assert m.draft_acceptance(r).value == m.examined_acceptance(r) == 1.0
    assert m.survival(r) == m.conditional(r) == [1.0, 1.0, 1.0]


def test_no_draft_proposed_is_null_not_zero():
    r = [plain(5)]
    assert m.draft_acceptance(r) == (None, "0")
    assert m.examined_acceptance(r) is m.survival(r) is m.conditional(r) is None
    assert m.tokens_per_verify(r) == 1.0
    assert m.accepted_per_verify(r) == 0.0


def test_nothing_at_all_is_null_everywhere():
    pooled = [
        m.tokens_per_verify,
        m.accepted_per_verify,
        m.emitted_per_verify,
        m.examined_acceptance,
        m.survival,
        m.conditional,
        m.mean_depth,
        m.draft_share,
        m.loop_share,
        m.tok_s,
    ]
    assert [f([]) for f in pooled] == [None] * len(pooled)
    assert m.draft_acceptance([]).value is None
    assert m.tokens_per_forward([]) == (None, None)


def test_mixed_depths_count_a_pass_only_where_it_proposed():
    r = [request([(1, 1), (1, 0), (3, 3), (3, 1), (0, 0)])]
    assert m.survival(r) == [0.75, 0.5, 0.5]  # position 1: only the two passes of depth 3
    assert m.conditional(r) == [0.75, 0.5, 1.0]
    assert m.draft_acceptance(r) == (5 / 8, "0-3")
    assert m.mean_depth(r) == 8 / 5


def test_depth_is_what_was_asked_although_a_drafter_proposed_fewer():
    r = [request([(1, 1), (3, 0)], depths=[3, 3])]
    assert m.draft_acceptance(r).depth == "3"
    assert m.mean_depth(r) == 3.0


def test_counts_are_pooled_over_requests_not_averaged():
    r = [request([(1, 1)] * 9), request([(1, 0)])]
    assert m.draft_acceptance(r).value == 0.9


def test_tokens_per_forward_names_both_conventions():
    both = m.tokens_per_forward([request([(3, 3), (3, 1)])])  # 2 prefill forwards, 1 + 6 tokens
    assert both.with_prefill == 7 / 4
    assert both.without_prefill == 6 / 2


# Time ----------------------------------------------------------------------------------------------------------


def test_bursts_of_one_to_four_tokens_share_a_time():
    r = request([(3, 0), (3, 1), (3, 2), (3, 3)], pass_ms=[1, 2, 3, 5])
    assert (
        m.token_times(r).tolist() == [10_000_000, 11_000_000] + [13_000_000] * 2 + [16_000_000] * 3 + [21_000_000] * 4
    )
    assert m.tpot_ms(r) == 11 / 10
    assert m.tok_s([r]) == pytest.approx(10 / 0.011)


def test_tpot_ends_with_the_last_token_not_with_an_empty_pass():
    r = request([(1, 1), (1, 0)], emitted_last=0)
    assert m.tpot_ms(r) == 4 / 2


@pytest.mark.parametrize("r", [request([(3, 3)], first=None), plain(0), request([(3, 3)], pass_ms=0)])
def test_one_burst_has_no_speed(r):
    assert m.tpot_ms(r) is None
    assert m.tok_s([r]) is None


def test_tok_s_of_several_rounds_is_not_moved_by_one_slow_one():
    rounds = [plain(4, pass_ms=t) for t in (4, 5, 90)] + [plain(4, id="b", pass_ms=t) for t in (10, 80, 10)]
    assert m.tok_s(rounds) == pytest.approx(8e3 / (4 * 5 + 4 * 10))


def test_ratios_are_paired_by_prompt_and_take_the_median_round():
    base = [plain(4, id="a", pass_ms=t) for t in (8, 9, 100)] + [plain(4, id="b", pass_ms=4), plain(4, id="c")]
    arm = [plain(4, id="a", pass_ms=1), plain(4, id="b", pass_ms=4), plain(4, id="d")]
    assert m.log_ratios(base, arm) == pytest.approx({"a": math.log(9), "b": 0.0})
    assert m.tpot_ratio(base, arm) == pytest.approx(3.0)
    assert m.tpot_ratio(base, []) is None


def test_e2e_includes_the_prefill():
    base, arm = plain(10, pass_ms=10, prefill_ms=100), plain(10, pass_ms=5, prefill_ms=100)
    assert m.tpot_ratio([base], [arm]) == pytest.approx(2.0)
    assert m.e2e_ratio([base], [arm]) == pytest.approx(200 / 150)


# Loops ---------------------------------------------------------------------------------------------------------


def test_loop_share_counts_repeated_eight_grams():
    looped = plain(23, first=0, tokens=[i % 8 for i in range(1, 24)])  # three times 0..7: 17 grams, 8 distinct
    assert m.loop_counts(looped) == (9, 17)
    assert m.loop_share([plain(23)]) == 0.0
    assert m.loop_share([plain(6)]) is None  # 7 tokens: no 8-gram


def test_loops_do_not_reach_across_requests():
    assert m.loop_share([plain(20), plain(20)]) == 0.0


# Divergence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "ended", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], (False, False), (None, 3)),
        ([1, 2, 3], [1, 9, 3], (False, False), (1, 2)),
        ([1, 2], [1, 2, 3], (False, False), (None, 2)),  # a shorter cap: censored
        ([1, 2], [1, 2, 3], (True, False), (2, 3)),  # it ended, the other went on: that is a difference
        ([1, 2, 3], [1, 2], (False, True), (2, 3)),
        ([1, 2], [1, 2, 3], (False, True), (None, 2)),
        ([], [1], (False, False), (None, 0)),
    ],
)
def test_first_divergence(a, b, ended, expected):
    assert m.first_divergence(a, b, a_ended=ended[0], b_ended=ended[1]) == expected


def test_divergence_is_found_far_into_a_stream():
    a = list(range(1000))
    b = a.copy()
    b[230] = -1
    assert m.first_divergence(a, b).index == 230


def test_divergences_per_1k_and_their_gaps():
    assert m.divergence_per_1k([[10, 60], [5]], [500, 1000]) == 2.0
    assert m.divergence_gaps([[60, 10, 100], [5]]) == [50, 40]
    assert m.divergence_per_1k([], []) is None


# Drafter quality and cost --------------------------------------------------------------------------------------


def test_match_and_overlap():
    assert m.match([1, 2, 3, 4], [1, 2, 0, 4]) == 0.75
    p, q = np.array([[0.5, 0.3, 0.2], [1, 0, 0]]), np.array([[0.7, 0.2, 0.1], [0, 1, 0]])
    assert m.overlap(p, q) == pytest.approx(0.4)  # 0.8 and 0.0
    assert m.match([], []) is m.overlap(np.zeros((0, 3)), np.zeros((0, 3))) is None


def test_arrays_that_are_not_aligned_are_refused():
    with pytest.raises(RequestError, match=r"\(3,\) and \(2,\)"):
        m.match([1, 2, 3], [1, 2])
    with pytest.raises(RequestError, match="overlap"):
        m.overlap(np.zeros((2, 3)), np.zeros((1, 3)))  # would broadcast


def test_verify_width_is_relative_to_one_row_and_reads_json_keys():
    assert m.verify_width({"1": 4.0, "4": 5.0}) == {1: 1.0, 4: 1.25}
    with pytest.raises(RequestError, match="1 row"):
        m.verify_width({2: 4.0})


def test_predicted_ratio_follows_the_formula():
    assert m.predicted_ratio(2.5, 3, 0.1, 1.4, 0.05) == pytest.approx(2.5 / 1.75)
    assert m.predicted_ratio(None, 3, 0.1, 1.4, 0.05) is None


COSTS = {"verify_ms": {1: 4.0, 2: 4.4, 4: 5.6}, "draft_ms": {1: 0.4, 3: 1.2}, "host_ms": 0.2}


def test_predicted_ratio_of_a_fixed_depth_equals_the_formula():
    assert m.predicted_ratio_of([golden()], COSTS) == pytest.approx(m.predicted_ratio(2.5, 3, 0.1, 1.4, 0.05))


def test_predicted_ratio_of_mixed_depths_averages_the_cost_over_passes():
    r = [request([(0, 0), (0, 0), (1, 1), (3, 3)])]
    cost = (1 + 1 + (0.1 + 1.1) + (0.3 + 1.4)) / 4 + 0.05 * 2 / 4
    assert m.predicted_ratio_of(r, COSTS) == pytest.approx(2.0 / cost)


def test_a_pass_without_drafts_is_predicted_to_cost_what_it_costs():
    assert m.predicted_ratio_of([request([(0, 0)] * 5)], COSTS) == pytest.approx(1.0)


def test_a_depth_without_measured_cost_has_no_prediction():
    assert m.predicted_ratio_of([request([(2, 1)])], COSTS) is None


# Identities ----------------------------------------------------------------------------------------------------

some_pass = st.integers(0, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))
traces = st.lists(some_pass, min_size=1, max_size=30)


@given(traces, st.integers(0, 6))
def test_sums_reconcile_for_every_trace_and_cut(passes, emitted):
    r = request(passes, emitted_last=min(emitted, passes[-1][1] + 1))
    c = m.counts([r])
    assert len(r.tokens) == m.emitted_total([r]) == 1 + c.emitted.sum() == m.token_times(r).size
    assert (c.accepted <= c.examined).all() and (c.examined <= c.proposed).all()
    assert (c.emitted <= c.accepted + 1).all()
    assert m.tokens_per_verify([r]) == pytest.approx(m.accepted_per_verify([r]) + 1)


@given(st.integers(1, 5).flatmap(lambda k: st.lists(st.tuples(st.just(k), st.integers(0, k)), min_size=1)))
def test_at_a_fixed_depth_survival_falls_and_is_the_product_of_conditional(passes):
    r = [request(passes)]
    alive, steps = m.survival(r), m.conditional(r)
    assert all(a >= b for a, b in itertools.pairwise(alive))
    assert np.cumprod([x or 0.0 for x in steps]) == pytest.approx(alive)
    assert sum(alive) == pytest.approx(m.accepted_per_verify(r))


@given(traces)
def test_a_request_survives_json(passes):
    r = request(passes, arm="depth3", round=1)
    again = Request.from_json(json.loads(json.dumps(r.to_json(), allow_nan=False)))
    assert again == r
    assert again.tokens == r.tokens


def test_a_foreign_schema_is_refused_by_number():
    with pytest.raises(ValueError, match="schema 99"):
        Request.from_json(golden().to_json() | {"schema": 99})
