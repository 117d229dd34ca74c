"""What a sweep prints, for people and for programs."""

from __future__ import annotations

import csv
import io
import json

import pytest
from run_builder import ARMS, build

from mtplab.report import render, tables
from mtplab.report.conclusions import conclusions
from mtplab.report.results import load_results

LOOP = [0, 1, 2, 3, 4, 5, 6, 7, 8] * 3  # 25 tokens whose 8-grams come back


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return load_results(build(tmp_path_factory.mktemp("r") / "run").folder)


def test_the_document_has_the_promised_shape_on_its_only_line(results):
    text = tables.sweep(results, "json")
    assert text.count("\n") == 1
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert list(document) == ["schema", "run", "machine", "verify", "rows", "failed"]
    assert (document["schema"], document["run"], document["failed"]) == (1, "run", [])
    assert len(document["rows"]) == 2 * 2 * 4
    wanted = {
        "corpus", "arm", "prompts", "rounds", "tokens", "tok_s", "tpot_ratio", "e2e_ratio", "tokens_per_verify",
        "accepted_per_verify", "draft_acceptance", "loop_share", "conditional", "survival", "mean_depth",
        "predicted_ratio", "equal_prompts", "first_divergence", "equal_through",
    }  # fmt: skip
    assert all(wanted <= row.keys() for row in document["rows"])
    assert all({"value", "low", "high"} <= row["tpot_ratio"].keys() for row in document["rows"])


def test_the_numbers_are_those_of_the_records(results):
    row = next(r for r in results.group("greedy", "c") if r["arm"] == "depth3")
    assert row["prompts"] == 6 and row["rounds"] == 3 and row["tokens"] == 6 * 3 * 23
    assert row["tokens_per_verify"]["value"] == pytest.approx(22 / 8)
    assert row["draft_acceptance"] == pytest.approx(14 / 24)
    # 22 tokens after the first in 8 passes of 13 ms, against 10 ms a token.
    assert row["tpot_ratio"]["value"] == pytest.approx(10 / (8 * 13 / 22), rel=1e-3)


def test_two_tables_and_a_column_for_equality_in_the_greedy_one_only(results):
    text = tables.sweep(results, "table")
    greedy, sampled = text.split("Sampled (temperature 0.8, sampled drafts, exact acceptance)")
    assert greedy.startswith("Greedy (temperature 0)")
    assert "equal to baseline" in greedy and "equal to baseline" not in sampled
    assert "0.58@3" in greedy and "@" in next(x for x in greedy.splitlines() if "adaptive" in x)
    assert len({len(x.rstrip()) for x in greedy.splitlines() if x.startswith("---")}) == 1


def test_forbidden_words_never_stand_in_the_output(results):
    text = render.sweep(results, "table") + render.sweep(results, "md") + render.sweep(results, "json")
    for words in ("acceptance rate", "acceptance length", "speedup", "lossless"):
        assert words not in text


def test_markdown_cannot_be_broken_by_a_name():
    column = tables.Column("a", lambda r: r["a"], right=False)
    text = tables.markdown([column], [{"a": "x|y\nz\\|w"}])
    assert text.splitlines()[2] == "| x\\|y z\\\\\\|w |"


def test_a_terminal_is_not_steered_by_a_name():
    column = tables.Column("a", lambda r: r["a"], right=False)
    assert "\x1b" not in tables.aligned([column], [{"a": "\x1b[2Jgone"}])


def test_csv_is_flat_and_undefined_cells_are_empty(results):
    rows = list(csv.DictReader(io.StringIO(tables.sweep(results, "csv"))))
    assert len(rows) == 16
    base = rows[0]
    assert base["arm"] == "baseline" and base["draft_acceptance"] == "" and base["tpot_ratio"] == "1.0"
    deep = next(r for r in rows if r["arm"] == "depth3")
    assert float(deep["tpot_ratio_low"]) <= float(deep["tpot_ratio"]) <= float(deep["tpot_ratio_high"])
    assert deep["survival"].count(";") == 2


def test_json_lines_are_rows(results):
    lines = [json.loads(x) for x in tables.sweep(results, "jsonl").splitlines()]
    assert [x["arm"] for x in lines[:4]] == list(ARMS)


def test_a_failed_trial_is_listed_and_in_no_row(tmp_path):
    store = build(tmp_path / "run", rounds=2, skip=["002-depth3-0", "003-depth3-0", "001-depth3-0", "000-depth3-0"])
    results = load_results(store.folder)
    assert len(results.failed) == 1
    row = next(r for r in results.rows if r["arm"] == "depth3")
    assert row["rounds"] == 1
    assert "it <b>broke</b>" in tables.sweep(results, "table")
    assert json.loads(tables.sweep(results, "json"))["failed"][0]["arm"] == "depth3"


def test_a_run_without_a_completed_trial_still_prints(tmp_path):
    store = build(tmp_path / "run", arms={"baseline": ARMS["baseline"]}, rounds=1, skip=["000-baseline-0"])
    results = load_results(store.folder)
    assert results.rows == [] and json.loads(tables.sweep(results, "json"))["rows"] == []
    assert "failed trial" in render.sweep(results, "table")


def test_conclusions_name_the_arm_that_pays_with_its_interval(results):
    first = conclusions(results)[0]
    assert first.startswith("novel, greedy: depth3 pays: 2.1") and "[" in first and "6 prompts, 3 rounds" in first
    assert "equals the baseline's through 2" in first


def test_no_claim_where_the_interval_reaches_one(tmp_path):
    arms = {"baseline": ARMS["baseline"], "depth1": ([(1, 0)] * 24, 10.0)}
    results = load_results(build(tmp_path / "run", arms=arms).folder)
    assert "No fixed arm is shown to pay" in conclusions(results)[0]
    assert "no difference at this sample size" in conclusions(results)[0]


def test_a_difference_that_an_arm_shows_against_itself_is_no_result(tmp_path):
    arms = {"baseline": ARMS["baseline"], "depth1": ([(1, 0)] * 24, 10.01)}
    results = load_results(build(tmp_path / "run", arms=arms).folder)
    row = next(r for r in results.rows if r["arm"] == "depth1")
    assert row["tpot_ratio"]["high"] < 1
    assert "no difference at this sample size (an arm against itself differs as much)" in conclusions(results)[0]


def test_a_slower_arm_does_not_pay(tmp_path):
    arms = {"baseline": ARMS["baseline"], "depth1": ([(1, 0)] * 24, 15.0)}
    text = conclusions(load_results(build(tmp_path / "run", arms=arms).folder))[0]
    assert "No fixed arm pays: the best, depth1, runs at 0.67" in text


def test_text_that_repeats_itself_is_marked_and_left_out(tmp_path):
    arms = {"baseline": (*ARMS["baseline"], LOOP), "depth3": ([(3, 3)] * 6, 13.0, LOOP)}
    results = load_results(build(tmp_path / "run", arms=arms, modes=("greedy",)).folder)
    assert all(r["marked"] for r in results.rows)
    text = render.sweep(results, "table")
    assert " *" in text and "left out of conclusions" in text
    assert "repeats itself: depth3." in conclusions(results)[0] and "pays" not in conclusions(results)[0]


def test_where_greedy_output_leaves_the_baseline(tmp_path):
    other = [*range(7), 99, *range(8, 30)]
    changed = {("depth3", "c"): (*ARMS["depth3"], other)}
    results = load_results(build(tmp_path / "run", changed=changed, modes=("greedy",)).folder)
    row = next(r for r in results.group("greedy", "c") if r["arm"] == "depth3")
    assert (row["first_divergence"], row["equal_prompts"]) == (7, 0)
    assert "0/6, leaves at 7" in tables.sweep(results, "table")
    assert "depth3 at token 7 at the earliest, 6 of 6 prompts" in conclusions(results)[1]


def test_a_control_that_differs_is_said_first(tmp_path):
    changed = {("depth0", "c"): (*ARMS["depth0"], [0, 1, 99, *range(3, 40)])}
    results = load_results(build(tmp_path / "run", changed=changed, modes=("greedy",)).folder)
    assert "The control depth0 leaves the baseline at token 2: the loop itself differs" in conclusions(results)[1]


def test_dialects_name_their_system_and_say_their_definition_once(results):
    text = render.sweep(results, "table", dialect="vllm")
    assert text.count("accepted drafts / proposed drafts") == 1
    document = json.loads(render.sweep(results, "json", dialect="gptfast"))
    assert {e["label"].split()[0] for e in document["dialect"]} == {"gpt-fast"}
