"""Depth policies: pure functions of the records they saw."""

from __future__ import annotations

import random

import pytest

from mtplab.decode.policy import AdaptiveDepth, FixedDepth, ReplayDepth
from mtplab.errors import RequestError
from mtplab.records.types import Verify

COSTS = {0: 100.0, 1: 125.0, 2: 150.0, 3: 175.0}


def verify(depth: int, accepted: int, ns: float) -> Verify:
    return Verify(0, 1, depth, depth, accepted, accepted + 1, None, 0, 0, (), (), 0, int(ns))


def simulate(policy, chances, passes, costs=COSTS, seed=0, slow=lambda pass_: 1.0):
    """Draft i stands with chances[i] given those before it. Returns the records; tokens per ns is what counts.
    `slow(pass)` is by how much the machine is slower then, whatever the depth."""
    rng, records, waiting = random.Random(seed), [], None
    for at in range(passes):
        depth = policy.next_depth() if waiting is None else waiting
        waiting = policy.next_depth() if depth == 0 else None  # as the loop does it
        accepted = 0
        while accepted < depth and rng.random() < chances[accepted]:
            accepted += 1
        records.append(verify(depth, accepted, costs[depth] * slow(at) * rng.uniform(0.97, 1.03)))
        policy.observe(records[-1])
    return records


def rate(records):
    return sum(r.emitted for r in records) / sum(r.pass_ns for r in records)


def best_rate(chances, costs=COSTS):
    return max(rate(simulate(FixedDepth(d), chances, 3000, costs)) for d in range(4))


@pytest.mark.parametrize(
    "chances, favourite",
    [((0.1, 0.1, 0.1), 0), ((0.5, 0.1, 0.1), 1), ((0.9, 0.9, 0.9), 3), ((0.8, 0.75, 0.1), 2), ((0.2, 0.95, 0.95), 0)],
)
def test_settles_on_the_best_depth_and_loses_little_on_the_way(chances, favourite):
    records = simulate(AdaptiveDepth(3, COSTS), chances, 1500)
    late = [r.depth for r in records[300:]]
    assert late.count(favourite) / len(late) > 0.8
    assert rate(records) > 0.97 * best_rate(chances)


def test_backs_off_when_the_text_turns_and_returns():
    policy = AdaptiveDepth(3, COSTS)
    simulate(policy, (0.95, 0.95, 0.95), 200)
    assert policy.depth == 3
    simulate(policy, (0.05, 0.05, 0.05), 200)
    assert policy.depth == 0
    simulate(policy, (0.95, 0.95, 0.95), 600)
    assert policy.depth == 3


def test_a_machine_that_changes_its_speed_misleads_nobody():
    """Twice as slow for 40 passes, then not: a time from before the change must not be held against another depth."""
    for seed in range(8):
        policy, slow = AdaptiveDepth(3, COSTS), lambda at: 2.0 if at // 40 % 2 else 1.0
        records = simulate(policy, (0.9, 0.9, 0.9), 600, seed=seed, slow=slow)
        assert [r.depth for r in records[40:]].count(3) > 500


def ratio(policy, depth: int, other: int) -> float:
    return policy.costs[depth] / policy.costs[other]


def test_a_machine_that_slows_down_as_the_depth_changes_does_not_rule_it_out():
    policy = AdaptiveDepth(3, COSTS)
    for ns in [COSTS[2]] * 5:
        policy.observe(verify(2, 2, ns))
    for ns in [3 * COSTS[3]] * 9:
        policy.observe(verify(3, 3, ns))
    for ns in [3 * COSTS[2]] * 3:
        policy.observe(verify(2, 2, ns))
    assert ratio(policy, 3, 2) == pytest.approx(COSTS[3] / COSTS[2], rel=0.15)


def test_a_run_of_overlapping_steps_is_timed_as_a_whole():
    """Entering depth 0 launches two steps and leaving it launches none: 170, 100, 30 are three steps of 100."""
    policy = AdaptiveDepth(3, {0: 50, 1: COSTS[1], 2: 1, 3: 1})
    for _ in range(40):
        for depth, ns in ((0, 170), (0, 100), (0, 30), *[(1, COSTS[1])] * 3):
            policy.observe(verify(depth, 0, ns))
    assert ratio(policy, 1, 0) == pytest.approx(COSTS[1] / 100, rel=0.02)


def test_it_begins_by_drafting_where_that_can_pay():
    """With its costs known and no text seen, sitting at depth 0 would teach nothing for a whole gap."""
    costs = {0: 100.0, 1: 160.0, 2: 210.0, 3: 227.0}
    policy = AdaptiveDepth(3, costs)
    simulate(policy, (0.9, 0.9, 0.9), 40, costs)
    fresh = AdaptiveDepth(3, costs)
    fresh.costs = policy.costs
    assert [r.depth for r in simulate(fresh, (0.9, 0.9, 0.9), 12, costs, seed=1)].count(3) >= 10
    hopeless = AdaptiveDepth(3, costs)
    hopeless.costs = policy.costs
    assert [r.depth for r in simulate(hopeless, (0.05, 0.05, 0.05), 60, costs, seed=1)].count(0) >= 52


def test_short_texts_lose_little():
    """64 tokens a text: what the last text taught is where the next one starts."""
    for chances in ((0.25, 0.2, 0.2), (0.8, 0.8, 0.8)):
        policy, records = AdaptiveDepth(3, COSTS), []
        for text in range(24):
            policy.start_request()
            records += simulate(policy, chances, 30, seed=text)
        assert rate(records) > 0.96 * best_rate(chances)


def test_dear_verifies_keep_it_at_zero_without_probing():
    """On a BLAS where width costs as much as it brings, even full acceptance cannot pay: each depth's cost is looked
    at once, and no further probe is wasted."""
    records = simulate(
        AdaptiveDepth(3, {0: 100, 1: 230, 2: 340, 3: 450}), (0.9, 0.9, 0.9), 500, {0: 100, 1: 230, 2: 340, 3: 450}
    )
    assert [r.depth for r in records][12:] == [0] * 488


def test_costs_are_learned_where_the_prior_was_wrong():
    """The prior calls depth 3 cheap; it is not."""
    true = {0: 100, 1: 120, 2: 300, 3: 400}
    records = simulate(AdaptiveDepth(3, {0: 100, 1: 101, 2: 102, 3: 103}), (0.7, 0.7, 0.7), 800, true)
    assert [r.depth for r in records[200:]].count(1) > 500


def test_replays_to_the_same_depths():
    chances = (0.6, 0.5, 0.4)
    policy = AdaptiveDepth(3, COSTS)
    simulate(policy, chances, 100)
    policy.start_request()
    state = policy.state()
    records = simulate(policy, chances, 300, seed=4)
    again, depths, waiting = AdaptiveDepth.from_state(state), [], None
    for r in records:
        depth = again.next_depth() if waiting is None else waiting
        waiting = again.next_depth() if depth == 0 else None
        depths.append(depth)
        again.observe(r)
    assert depths == [r.depth for r in records]
    assert len(set(depths)) > 1


def test_fixed_and_replay():
    assert [FixedDepth(2).next_depth() for _ in range(3)] == [2, 2, 2]
    replay = ReplayDepth([1, 0, 3])
    assert [replay.next_depth() for _ in range(5)] == [1, 0, 3, 0, 0]


@pytest.mark.parametrize("make", [FixedDepth, AdaptiveDepth])
def test_depth_9_is_refused(make):
    with pytest.raises(RequestError, match="depth 9 is out of range; use 0 to 8"):
        make(9)


def test_a_cost_model_with_a_hole_is_refused():
    with pytest.raises(RequestError, match="lacks depth 2"):
        AdaptiveDepth(3, {0: 1, 1: 1, 3: 1})
