"""The verdict as a pure function of the evidence, case by case, and the numbers of the document by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtplab.diagnose.reference import Choice
from mtplab.diagnose.seen import Fault, Leave, Seen
from mtplab.diagnose.summary import histogram, percentile, ulps
from mtplab.diagnose.verdict import Evidence, Moved, gravest, judge, module_at_fault


def leave(gap: float, noise: float | None = None) -> Leave:
    return Leave(7, 2, 3, 10, 11, gap, Choice(11, 10, 0.1, 9.0), Choice(10, 11, gap, 9.0), 0.2, 9.0, noise)


def left(gap: float, noise: float, **more) -> tuple[Seen, Evidence]:
    """An arm that leaves at a gap, with the noise measured from the one-token state."""
    seen = Seen(compared=20, leaves=[leave(gap)])
    return seen, Evidence("p", leave(gap), Seen(), {1: 0.0, 4: noise}, **more)


def test_a_gap_within_twice_the_noise_and_a_clean_state_are_numeric():
    for gap, noise, verdict in ((0.02, 0.01, "numeric"), (0.021, 0.01, "unknown"), (0.0, 0.0, "numeric")):
        seen, evidence = left(gap, noise)
        assert judge(seen, evidence, reproducible=True).verdict == verdict


def test_the_noise_of_the_chain_counts_as_well():
    seen, evidence = left(0.05, 0.01)
    assert judge(seen, evidence, reproducible=True).verdict == "unknown"
    evidence.leave = leave(0.05, noise=0.03)
    assert judge(seen, evidence, reproducible=True).verdict == "numeric" and evidence.noise == 0.03


def test_noise_that_was_not_measured_proves_nothing():
    assert judge(Seen(compared=9, leaves=[leave(1e-9)]), None, reproducible=True).verdict == "unknown"


def test_a_small_gap_does_not_excuse_a_module_that_is_far_off():
    moved = [Moved("model.layers.0.self_attn.o_proj", "linear", 0.3, made=False, given=0.3)]
    seen, evidence = left(0.0001, 5.6, modules=moved, located=True)
    found = judge(seen, evidence, reproducible=True)
    assert found.verdict == "logic" and found.module == "model.layers.0.self_attn"
    assert found.reason.endswith("no rounding is that large")
    evidence.modules = [replace(moved[0], reach=(0.021, 0.018))]
    assert judge(seen, evidence, reproducible=True).reason.endswith("rounding moves them by 0.02")


def test_a_wrong_state_is_logic_at_any_gap():
    seen, evidence = left(0.0001, 5.6)
    seen.faults.append(Fault("state", 3, 1, 2, "holds 1 row too many", counted=True))
    found = judge(seen, evidence, reproducible=True, paths=["a.0", "a.1", "a.2"])
    assert (found.verdict, found.layer, found.verify) == ("logic", 2, 1) and found.reason.startswith("a.2: holds 1 row")


def test_an_irreproducible_baseline_excuses_rounding_but_not_counting():
    soft = Fault("logits", 3, 1, None, "its logits are 0.1 away")
    hard = Fault("fed", 3, 1, None, "fed token 4 where the text has 5", counted=True)
    assert judge(Seen(compared=9, faults=[soft], rows_differ=2), None, reproducible=False).verdict == "unknown"
    assert judge(Seen(compared=9, faults=[soft], rows_differ=2), None, reproducible=True).verdict == "logic"
    assert judge(Seen(compared=9, faults=[soft, hard], rows_differ=2), None, reproducible=False).verdict == "logic"


def test_ends_and_equality():
    assert judge(Seen(compared=9, end="short"), None, reproducible=True).verdict == "length"
    found = judge(Seen(compared=9, end="cap"), None, reproducible=True)
    assert found.verdict == "equal" and found.reason == "equal through 9 tokens"
    assert gravest(["equal", "numeric", "logic"]) == "logic" and gravest([]) == "equal"


@pytest.mark.parametrize(
    ("sizes", "at_fault"),
    [
        ([1e-7, 2e-7, 0.2], 2),  # suddenly
        ([1e-2, 1.5e-2, 4e-2, 6e-2], None),  # large noise that grows slowly
        ([0.1], 0),
        ([5e-3, 2e-2], None),
    ],
)
def test_a_module_is_at_fault_if_it_is_far_off_and_suddenly_so(sizes, at_fault):
    modules = [Moved(f"m{i}", "linear", s) for i, s in enumerate(sizes)]
    found = module_at_fault(modules)
    assert found is (None if at_fault is None else modules[at_fault])


def test_the_core_of_an_attention_is_held_to_more_than_a_linear():
    """One key of a window of hundreds moves the output by under a percent; float32 sums do not."""
    before = Moved("layers.0.self_attn.q_proj", "linear", 1e-7)
    handed = Moved("layers.0.self_attn.o_proj", "linear", 8e-3, made=False, given=8e-3)
    assert module_at_fault([before, handed]) is handed and handed.culprit == "layers.0.self_attn"
    assert module_at_fault([before, Moved("layers.0.self_attn", "attention", 8e-3)]) is not None
    assert module_at_fault([before, Moved("layers.0.mlp.up_proj", "linear", 8e-3)]) is None
    assert module_at_fault([before, replace(handed, wide=False)]) is None


def test_a_linear_that_rounds_coarsely_is_no_fault_of_what_is_around_it():
    """Its input hardly differs: nothing happened between the modules."""
    before = Moved("layers.1", "block", 6e-7)
    assert (
        module_at_fault([before, Moved("layers.2.self_attn.q_a_proj", "linear", 7e-3, made=False, given=6e-7)]) is None
    )


def test_what_a_module_was_handed_counts_as_moved_before():
    norm = Moved("layers.0.norm", "norm", 1e-3, made=False, given=4e-3, wide=False)
    up = Moved("layers.1.up_proj", "linear", 0.033)
    assert module_at_fault([norm, up]) is up
    assert module_at_fault([replace(norm, given=5e-3), up]) is None


def test_a_module_that_is_off_by_far_more_than_its_input_is_named_itself():
    moved = Moved("layers.1.self_attn.v_proj", "linear", 1.4, made=False, given=1e-3)
    assert module_at_fault([Moved("layers.0", "block", 1e-3), moved]).culprit == "layers.1.self_attn.v_proj"


def test_what_rounding_does_to_the_same_rows_is_held_against_nobody():
    before = Moved("layers.0.linear_attn.in_proj_qkv", "linear", 3e-3)
    norm = Moved("layers.0.linear_attn.norm", "norm", 0.09, made=False, given=5e-3)
    assert module_at_fault([before, norm]) is norm
    assert module_at_fault([before, replace(norm, reach=(0.03, 4e-3))]) is None
    assert module_at_fault([before, replace(norm, reach=(0.01, 4e-3))]) is not None
    core = Moved("layers.0.self_attn.o_proj", "linear", 0.02, made=False, given=0.02)
    fine = replace(before, relative=1e-6)
    assert module_at_fault([fine, core]) is core
    assert module_at_fault([fine, replace(core, reach=(0.0, 4e-3))]) is None


def test_what_is_far_off_elsewhere_excuses_no_module_that_works_on_rows_alone():
    """A step of a cache, or another expert, is carried on; a linear that makes more of its input than that is wrong."""
    cache = Moved("layers.0.cache.keys", "cache", 0.3, made=False, given=3e-3, beyond=0.0)
    down = Moved("layers.2.mlp.down_proj", "linear", 0.5, made=False, given=0.1, reach=(0.1, 0.1))
    assert module_at_fault([cache, down]) is down
    for changed in ({"given": 0.13}, {"reach": (0.13, 0.1)}, {"reach": (0.0, 0.0)}, {"kind": "block"}):
        assert module_at_fault([cache, replace(down, **changed)]) is None


def test_a_choice_that_no_tie_explains_is_the_routers_own_or_made_before_the_experts_are_told():
    gate = Moved("layers.1.mlp.gate", "router", 1.0, choice="wrong")
    told = Moved("layers.1.mlp.switch_mlp", "experts", 1.3, choice="wrong")
    assert gate.culprit == "layers.1.mlp.gate" and told.culprit == "layers.1.mlp"
    for m in (gate, told):
        assert module_at_fault([m]) is m and module_at_fault([replace(m, choice="set")]) is None
    seen, evidence = left(0.01, 5.0, modules=[gate], located=True)
    assert "another choice" in judge(seen, evidence, reproducible=True).reason


def test_steps_of_a_quantized_cache_are_no_fault_and_what_goes_beyond_them_is():
    made = [Moved("layers.0.self_attn.v_proj", "linear", 3e-3)]
    rows = Moved("layers.0.cache.values", "cache", 0.2, made=False, given=3e-3, beyond=0.0)
    handed = Moved("layers.0.self_attn.o_proj", "linear", 0.15, made=False, given=0.15)
    assert module_at_fault([*made, rows, handed]) is None
    assert module_at_fault([*made, handed]) is handed
    beyond = replace(rows, relative=1.4, beyond=0.9)
    assert module_at_fault([*made, beyond, handed]) is beyond and beyond.culprit == "layers.0.cache.values"


def test_ulps_by_hand():
    # Neighbours of 9.0 are 2**-20 apart in float32 and 1/16 in bfloat16.
    assert ulps(3 * 2.0**-20, 9.0, "float32") == 3
    assert ulps(0.125, 9.0, "bfloat16") == 2
    assert ulps(0.1, 0.0, "float32") is None and ulps(0.1, 3.0, "int8") is None


def test_percentile_and_histogram_by_hand():
    assert percentile(2.0, [1.0, 2.0, 3.0, 4.0]) == 0.5 and percentile(0.5, [1.0]) == 0 and percentile(1.0, []) is None
    made = histogram([0.0, 1.0, 1.1, 1e9])
    assert made["counts"][0] == 1 and made["counts"][-1] == 1 and sum(made["counts"]) == 4
    assert made["counts"][made["edges"].index(1.0) + 1] == 2
