"""The canvas policies as functions, worked out by hand; and where effective values come from."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mtplab.decode import canvas_policy as p
from mtplab.errors import RequestError

POLICY = p.CanvasPolicy()


def test_the_linear_schedule_counts_down_and_never_reaches_t_min():
    policy = p.CanvasPolicy(steps=4, t_max=0.8, t_min=0.4)
    assert [round(p.temperature(policy, i), 6) for i in range(4)] == [0.8, 0.7, 0.6, 0.5]
    constant = p.CanvasPolicy(schedule="constant", t_max=0.6, t_min=0.6)
    assert {p.temperature(constant, i) for i in range(48)} == {0.6}


def test_entropy_bound_by_hand():
    # Ascending: 0.01 0.02 0.05 0.30 1.0; cumsum - cummax: 0, 0.01, 0.03, 0.08, 0.38.
    entropy = np.array([0.30, 0.02, 1.0, 0.01, 0.05], np.float32)
    assert p.entropy_bound(entropy, 0.1).tolist() == [True, True, False, True, True]
    assert p.entropy_bound(entropy, 0.05).tolist() == [False, True, False, True, True]
    assert p.entropy_bound(entropy, 0.0).tolist() == [False, False, False, True, False]
    assert p.entropy_bound(entropy, 9.0).all()


def test_confident_takes_all_above_the_threshold_or_the_surest_open_one():
    sure, held = np.array([0.95, 0.5, 0.9, 0.7]), np.array([True, False, False, False])
    assert np.flatnonzero(p.confident(sure, held, 0.9)).tolist() == [2]
    assert np.flatnonzero(p.confident(sure, held, 0.99)).tolist() == [2], "at least one a step, and never a held one"
    assert np.flatnonzero(p.confident(sure, held, 0.4)).tolist() == [1, 2, 3]


def test_surest_takes_the_first_of_equals_and_no_more_than_are_open():
    assert np.flatnonzero(p.surest(np.array([0.5, 0.5, 0.5]), np.zeros(3, bool), 2)).tolist() == [0, 1]
    assert p.surest(np.array([0.5, 0.5]), np.array([True, False]), 5).tolist() == [False, True]


@pytest.mark.parametrize(("positions", "steps", "taken"), [(8, 3, [3, 3, 2]), (3, 8, [1, 1, 1]), (8, 1, [8])])
def test_shares_fill_every_position_once(positions, steps, taken):
    left, out = positions, []
    for step in range(steps):
        if left:
            out.append(p.share(left, steps - step))
            left -= out[-1]
    assert out == taken and left == 0


def test_final_tokens():
    argmax, canvas, held = np.array([1, 2, 3]), np.array([7, 8, 9]), np.array([True, False, True])
    assert p.final(p.CanvasPolicy(finalise="argmax"), argmax, canvas, held).tolist() == [1, 2, 3]
    assert p.final(p.CanvasPolicy(finalise="kept"), argmax, canvas, held).tolist() == [7, 2, 9]


# Effective values --------------------------------------------------------------------------------------------------

CHECKPOINT = {"steps": 24, "t_max": 0.9, "entropy_bound": 0.3, "canvas": 64}
SOURCES = {k: f"generation_config.json: {k}" for k in CHECKPOINT}


def resolve(asked, defaults=CHECKPOINT, *, canvas=64, masked=False):
    return p.resolve(asked, defaults, SOURCES, canvas=canvas, masked=masked)


def test_the_request_wins_over_the_checkpoint_and_that_over_the_reference():
    policy, sources = resolve({"steps": 8, "t_min": None, "sampler": None})
    assert (policy.steps, policy.t_max, policy.t_min, policy.bound, policy.canvas) == (8, 0.9, 0.4, 0.3, 64)
    assert sources["steps"] == "request" and sources["t_min"] == "reference"
    assert sources["t_max"] == "checkpoint: generation_config.json: t_max"
    assert sources["bound"] == "checkpoint: generation_config.json: entropy_bound"
    assert set(sources) == set(policy.effective())


def test_without_any_word_the_reference_stands():
    policy, sources = resolve({}, {}, canvas=256)
    assert policy == p.CanvasPolicy() and set(sources.values()) == {"reference"}


def test_a_masked_denoiser_has_defaults_of_its_own():
    policy, _ = resolve({}, {"steps": 32}, masked=True)
    assert (policy.accept, policy.renoise, policy.proposal, policy.finalise) == ("confidence", "mask", "argmax", "kept")
    assert (policy.schedule, policy.t_max, policy.t_min, policy.steps) == ("constant", 1.0, 1.0, 32)


def test_a_number_after_a_samplers_name_was_asked_for_and_so_was_what_the_name_stands_for():
    _, sources = resolve({"sampler": "confidence:0.95"})
    assert {sources[k] for k in ("accept", "threshold", "proposal", "stop", "finalise")} == {"request"}
    assert sources["bound"] == "checkpoint: generation_config.json: entropy_bound", "not what was asked for"
    policy, sources = resolve({"sampler": "entropy:0.7"})
    assert (policy.bound, sources["bound"]) == (0.7, "request"), "wins over the checkpoint's 0.3"
    assert set(resolve({"sampler": None})[1].values()) == {"reference", *(f"checkpoint: {s}" for s in SOURCES.values())}


def test_one_constant_temperature_has_one_source():
    policy, sources = resolve({"schedule": "constant"})
    assert policy.t_min == policy.t_max == 0.9
    assert sources["t_min"] == sources["t_max"] == "checkpoint: generation_config.json: t_max"
    _, sources = resolve({"schedule": "constant", "t_max": 0.5})
    assert sources["t_min"] == sources["t_max"] == "request"
    assert resolve({"schedule": "constant"}, {}, canvas=256)[1]["t_min"] == "reference"


def test_what_a_masked_model_needs_is_not_what_was_asked_for():
    policy, sources = resolve({"sampler": "confidence"}, {}, masked=True)
    assert (policy.proposal, sources["proposal"]) == ("argmax", "reference"), "the name stands for sampled"
    assert sources["accept"] == sources["finalise"] == "request"
    _, sources = resolve({"sampler": "confidence", "proposal": "sampled"}, {}, masked=True)
    assert sources["proposal"] == "request"


def test_samplers_by_name_and_number():
    assert resolve({"sampler": "entropy:0.7"})[0].bound == 0.7
    assert resolve({"sampler": "confidence:0.95"})[0].threshold == 0.95
    assert resolve({"sampler": "count:4"})[0].count == 4
    assert resolve({"sampler": "argmax"})[0].proposal == "argmax"


@pytest.mark.parametrize(
    ("asked", "masked", "words"),
    [
        ({"steps": 0}, False, "--steps 0 is out of range; use 1 or more"),
        ({"canvas": 0}, False, "--canvas 0 is out of range"),
        ({"canvas": 65}, False, "--canvas 65 is above this model's 64; use 1 to 64"),
        ({"sampler": "turbo"}, False, "unknown sampler 'turbo'; there is entropy"),
        ({"sampler": "entropy:much"}, False, "'much' is not a number"),
        ({"sampler": "count:1.5"}, False, "'1.5' is not a whole number"),
        ({"sampler": "entropy:-1"}, False, "--bound -1.0 is out of range"),
        ({"sampler": "entropy:nan"}, False, "--bound nan is out of range"),
        ({"sampler": "confidence:1.5"}, False, "--threshold 1.5 is out of range"),
        ({"sampler": "confidence:0"}, False, "--threshold 0.0 is out of range"),
        ({"sampler": "count:0"}, False, "--count 0 is out of range"),
        ({"t_max": 0.0}, False, "--t-max 0.0 is out of range"),
        ({"t_max": 1e300}, False, "--t-max 1e+300 is out of range"),
        ({"t_max": 1e-300, "t_min": 1e-300}, False, "--t-max 1e-300 is out of range"),
        ({"t_min": 1e-300}, False, "--t-min 1e-300 is out of range"),
        ({"t_max": float("nan")}, False, "--t-max nan is out of range"),
        ({"t_max": 0.5, "t_min": 0.6}, False, "--t-min 0.6 is out of range; use 0, or a temperature up to 0.5"),
        ({"t_max": 0.3}, False, "--t-max 0.3 is below t_min 0.4 (of the reference); give --t-min, too"),
        ({"sampler": "argmax", "proposal": "sampled"}, False, "--proposal sampled is not what --sampler argmax means"),
        ({"stability": -1}, False, "--stability -1 is out of range"),
        ({"confidence": 0.0}, False, "--confidence 0.0 is out of range"),
        ({"stop": "maybe"}, False, "--stop 'maybe' is not one of stable, accepted, none"),
        ({"renoise": "mask"}, False, "needs a denoiser with a mask token"),
        ({"renoise": "uniform"}, True, "not for a masked denoiser"),
        ({"sampler": "entropy"}, True, "takes tokens back; use confidence or count"),
        ({"sampler": "argmax:0.2"}, True, "--sampler argmax:0.2 takes tokens back; use confidence or count"),
        ({"bound": 0.2}, True, "bound is for the entropy acceptance and this sampler's is confidence"),
        ({"stability": 2, "stop": "accepted"}, False, "stability is for --stop stable"),
        ({"schedule": "constant", "t_max": 0.8, "t_min": 0.4}, False, "a constant schedule has one temperature"),
    ],
)
def test_what_cannot_be_honoured_is_one_sentence(asked, masked, words):
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        resolve(asked, masked=masked)
    assert "\n" not in str(caught.value)
