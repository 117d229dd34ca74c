"""Faults of known cause get the verdict that is right, and the layer or module that is at fault; sound runs get none.

A part of the zoo, one of each kind; `python tests/diagnose/zoo.py` runs all of it with 400 sound runs.
"""

from __future__ import annotations

import itertools

import pytest
import zoo
from zoo import Case

from mtplab.diagnose.verdict import Verdict

FAST = (
    "roll-back off by one",
    "one row too few",
    "roll-back skipped in layer 1",
    "quantized KV off by one",
    "old row overwritten in layer 1",
    "only on the second reject",
    "only on full acceptance",
    "ring trimmed in silence",
    "gated-delta state stale",
    "conv window shifted",
    "EOS cut leaves the cache ahead",
    "head cache not trimmed",
    "head trims its attention only",
    "head gets wrong hidden rows",
    "penalty keeps rejected tokens",
    "last prompt token prefetched twice",
    "correction read from row 0",
    "ties to the highest id",
    "a right draft thrown away",
    "rejected draft fed on",
    "gate rows shifted",
    "window one key too narrow",
    "rows of a block see ahead",
    "stops one token early",
    "EOS unseen inside a block",
    "wrong position after a reject",
    "late fault behind near-ties",
    "router near-ties, another order",
    "router near-ties, other experts",
    "router rows shifted",
    "router's choice shifted",
    "gated-delta state stale under noise",
    "split-K of an unembedding",
    "split-K in layer 1",
    "bf16 sums in one MLP",
    "noise 1e-2",
    "value rows shifted, 4-bit KV, low precision",
    "4-bit KV holds the rows of a block shifted",
    "gate rows shifted under noise 1e-2",
    "window one key too narrow under noise 1e-3",
    "head gets wrong hidden rows under noise 1e-2",
    "4-bit KV, bf16 sums",
    "2-bit KV, low precision",
    "a norm over little, low precision",
    "a recurrence, bf16 sums",
    "sums that cancel, bf16 sums",
    "sliding window, float32",
    "sliding window, one row after a block",
)


@pytest.fixture(scope="module")
def animals(tmp_path_factory) -> zoo.Zoo:
    return zoo.Zoo(tmp_path_factory.mktemp("zoo"))


CASES = {c.name: c for c in zoo.cases()}


@pytest.mark.parametrize("case", [CASES[name] for name in FAST], ids=FAST)
def test_the_verdict_and_the_place_are_right(animals, case: Case):
    outcome = animals.run(case)
    assert outcome.verdict == case.verdict, outcome.reason
    assert outcome.placed is not False, f"named {outcome.where}, at fault is {case.where}"


def test_the_zoo_is_large_enough_and_names_are_unique():
    names = [c.name for c in zoo.cases()]
    assert len(set(names)) == len(names)
    assert sum(c.verdict == "logic" for c in zoo.cases()) >= 30
    assert sum(c.verdict == "numeric" for c in zoo.cases()) >= 15


def test_sound_runs_raise_no_alarm(animals):
    for name, verdict in itertools.islice(zoo.clean(animals), 18):
        # A sliding window past its size rounds differently by width, and may flip a near-tie.
        allowed = ("equal", "numeric") if name.startswith("gemma3") else ("equal",)
        assert verdict.verdict in allowed, f"{name}: {verdict.reason}"


def test_sound_runs_under_coarse_arithmetic_raise_no_alarm(animals):
    for name, verdict in itertools.islice(zoo.rough(animals), 22):  # one arithmetic, every family
        assert verdict.verdict in ("equal", "numeric"), f"{name}: {verdict.reason}"


def test_the_confusion_table_counts_and_marks_what_is_wrong():
    case = CASES["noise 1e-2"]
    right = zoo.Outcome(case, "numeric", "", "model.layers.1.self_attn.q_proj", 0.1)
    misplaced = zoo.Outcome(case, "numeric", "", "model.layers.0.self_attn.q_proj", 0.1)
    wrong = zoo.Outcome(CASES["ties to the highest id"], "equal", "", None, 0.1)
    text = zoo.table([right, misplaced, wrong], [], [Verdict("equal", ""), Verdict("logic", "")])
    assert "| none, coarse arithmetic | 2 | 1 | 0 | 1 | 0 | 0 |" in text
    assert "| numeric | 2 | 0 | 2 | 0 | 0 | 0 |" in text and "| logic | 1 | 1 | 0 | 0 | 0 | 0 |" in text
    assert "right: 1 of 2" in text and text.count("**wrong**") == 2
