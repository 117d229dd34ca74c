"""Numbers about canvases, each against a case worked out by hand; the summary and its recommendation."""

from __future__ import annotations

import json

import pytest
from canvas_builders import canvas_request
from hypothesis import given
from hypothesis import strategies as st

from mtplab.errors import RequestError
from mtplab.records import canvas_metrics as m
from mtplab.records.canvas import CanvasRequest
from mtplab.records.canvas_summary import frontier, recommend, recommended_steps, summarize

# Two canvases of 4: 2 and 4 steps of 10 ms, one commit of 5 ms between; 6 of the 8 tokens were asked for.
GOLDEN = canvas_request([[1, 2, 2, 3], [4, 5, 6, 7]], steps=[2, 4], emitted=2)


def test_the_golden_request():
    assert m.forwards([GOLDEN]) == (1, 6, 1)
    per = m.tokens_per_forward([GOLDEN])
    assert (per.without_prefill, per.with_prefill, per.emitted) == (8 / 7, 8 / 8, 6 / 8)
    assert m.emitted_total([GOLDEN]) == 6 and GOLDEN.tokens == (1, 2, 2, 3, 4, 5)
    assert m.steps_used([GOLDEN]) == [2, 4] and m.steps_histogram([GOLDEN]) == {2: 1, 4: 1}
    assert m.cap_share([GOLDEN]) == 0.5
    assert m.generation_ms(GOLDEN) == 65
    assert m.tok_s([GOLDEN]) == pytest.approx(6 / 0.065) and m.positions_s([GOLDEN]) == pytest.approx(8 / 0.065)
    assert (m.step_ms([GOLDEN]), m.commit_ms([GOLDEN])) == (10, 5)
    assert m.entropy_by_step([GOLDEN]) == [(1.0, 2), (0.5, 2), (1 / 3, 1), (0.25, 1)]


def test_tokens_after_the_end_of_text_are_no_valid_ones():
    from dataclasses import replace

    last = replace(GOLDEN.canvases[1], eos=0, valid=1, emitted=1, cut="eos")
    cut = replace(GOLDEN, canvases=(GOLDEN.canvases[0], last))
    assert m.tokens_per_forward([cut]).without_prefill == 5 / 7 and m.positions_s([cut]) == m.positions_s([GOLDEN])


def test_nothing_is_none_and_not_zero():
    assert m.tok_s([]) is None and m.cap_share([]) is None and m.step_ms([]) is None
    assert m.tokens_per_forward([]) == (None, None, None) and m.settling([]).shape == (0, 0)


def test_settling_is_a_share_of_canvases_by_step_and_position():
    a = canvas_request([[1, 2, 3]], cap=3, settled=[1, 3, 3])
    b = canvas_request([[1, 2, 3]], cap=3, settled=[1, 1, 3])
    assert m.settling([a, b]).tolist() == [[1, 0.5, 0], [0, 0, 0], [0, 0.5, 1]]


def test_agreement_and_edit_distance():
    assert m.agreement([1, 2, 3, 4], [1, 2, 3, 4]) == (4, 4) and m.edit_distance([1, 2], [1, 2]) == (0, 2)
    assert m.agreement([9, 1, 2, 3], [1, 2, 3, 4]) == (0, 4)
    assert m.edit_distance([9, 1, 2, 3], [1, 2, 3, 4]) == (2, 4), "a shift is two edits"
    assert m.agreement([1, 2], [1, 2, 3, 4]) == (2, 4) and m.edit_distance([], [1, 2, 3]) == (3, 3)


@given(st.lists(st.integers(0, 3), max_size=9), st.lists(st.integers(0, 3), max_size=9))
def test_edit_distance_is_the_textbook_one(a, b):
    table = [[max(i, j) if not i * j else 0 for j in range(len(b) + 1)] for i in range(len(a) + 1)]
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            table[i][j] = min(table[i - 1][j] + 1, table[i][j - 1] + 1, table[i - 1][j - 1] + (a[i - 1] != b[j - 1]))
    assert m.edit_distance(a, b) == (table[-1][-1], max(len(a), len(b)))


def test_distinct_and_repetition():
    assert m.distinct([1, 2, 1, 2, 1], 2) == (2, 4) and m.distinct([1], 2) == (0, 0)
    assert m.repetition([1, 1, 1, 2, 2]) == (3, 4) and m.repetition([]) == (0, 0)


def test_a_request_survives_json_and_foreign_ones_are_refused():
    text = json.dumps(GOLDEN.to_json(), allow_nan=False)
    assert CanvasRequest.from_json(json.loads(text)) == GOLDEN
    with pytest.raises(ValueError, match="schema 99"):
        CanvasRequest.from_json(json.loads(text) | {"schema": 99})
    with pytest.raises(ValueError, match="kind 'verify'"):
        CanvasRequest.from_json(json.loads(text) | {"kind": "verify"})


# The summary -------------------------------------------------------------------------------------------------------

TEXTS = {4: [9, 9, 9, 4], 8: [1, 2, 3, 9], 16: [1, 2, 3, 4]}
NLL = {4: 20.0, 8: 8.2, 16: 8.0}


def arm(steps, seeds=2, prompts=3, corpus="novel", spread=0.4):
    """nll of `steps`, moved by the seed: two seeds differ by `spread` in all, 0.1 a token of 4."""
    return [
        canvas_request(
            [TEXTS[steps]], steps=steps, cap=steps, id=f"p{p}", seed=s, corpus=corpus, nll=NLL[steps] + spread * s
        )
        for s in range(seeds)
        for p in range(prompts)
    ]


def test_rows_compare_with_the_longest_run_of_the_same_seed():
    rows = {r["steps"]: r for r in summarize([*arm(4), *arm(8), *arm(16)])}
    assert rows[8]["agreement"]["value"] == 0.75 and rows[4]["agreement"]["value"] == 0.25
    assert rows[8]["edit_distance"]["value"] == 0.25 and rows[16]["agreement"]["value"] is None
    assert rows[16]["nll"]["value"] == pytest.approx(8.2 / 4) and rows[8]["prompts"] == 3 and rows[8]["seeds"] == 2
    assert rows[8]["loss"]["nll"]["value"] == pytest.approx(0.05)
    assert rows[16]["noise_floor"]["nll"]["value"] == pytest.approx(-0.1)
    assert rows[4]["repetition"]["value"] == pytest.approx(2 / 3) and rows[4]["inside_noise"] is False
    assert rows[8]["inside_noise"] is True
    assert rows[4]["steps_histogram"] == {4: 6} and rows[4]["cap_share"] == 1.0
    json.dumps(list(rows.values()), allow_nan=False)


def test_the_fewest_steps_inside_the_noise_floor_are_recommended():
    said = recommend(summarize([*arm(4), *arm(8), *arm(16)]))
    assert [s["steps"] for s in said] == [8] and "inside what two seeds of 16" in said[0]["reason"]
    tight = recommend(summarize([*arm(4), *arm(8, spread=0.0), *arm(16, spread=0.0)]))
    assert tight[0]["steps"] == 16 and "8 steps lose more" in tight[0]["reason"]


def test_one_seed_recommends_nothing_and_says_why():
    said = recommend(summarize([*arm(8, seeds=1), *arm(16, seeds=1)]))
    assert said[0]["steps"] is None and "one seed" in said[0]["reason"] and recommended_steps(said) is None
    assert recommend(summarize(arm(16)))[0]["reason"] == "one number of steps: nothing to compare"


def test_a_lucky_small_number_below_a_bad_one_is_not_recommended():
    NLL[2], TEXTS[2] = 8.0, [1, 2, 3, 4]
    try:
        assert recommend(summarize([*arm(2), *arm(4), *arm(16)]))[0]["steps"] == 16
    finally:
        del NLL[2], TEXTS[2]


def test_the_run_needs_what_its_hardest_text_needs():
    rows = summarize([*arm(8), *arm(16), *arm(8, corpus="c", spread=0.0), *arm(16, corpus="c", spread=0.0)])
    assert [(r["corpus"], r["steps"]) for r in recommend(rows)] == [("novel", 8), ("c", 16)]
    assert recommended_steps(recommend(rows)) == 16


def test_without_a_score_nothing_is_recommended():
    from dataclasses import replace

    rows = summarize([replace(r, nll=None, scored=0) for r in [*arm(8), *arm(16)]])
    assert recommend(rows)[0]["steps"] is None and rows[0]["nll"]["value"] is None


def test_a_request_stored_twice_is_refused():
    with pytest.raises(RequestError, match="p0 with seed 0 is stored twice"):
        summarize([*arm(8), *arm(8)])


def test_the_frontier_is_what_no_other_row_beats_in_both():
    rows = [
        {"tokens_per_forward": x, "nll": {"value": y}} for x, y in ((1, 2.0), (2, 2.5), (2, 2.4), (3, 3.0), (0.5, 2.0))
    ]
    assert frontier(rows) == [0, 2, 3] and frontier([{"tokens_per_forward": None, "nll": {"value": 1}}]) == []
