"""The benchmark scripts run on a tiny checkpoint and end with one JSON document; their arithmetic by hand."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import common  # noqa: E402
import memory  # noqa: E402
import output  # noqa: E402
import predicted  # noqa: E402
import run as everything  # noqa: E402
import smollm2  # noqa: E402

from mtplab.errors import RequestError  # noqa: E402
from mtplab.models.target import Target  # noqa: E402
from mtplab.trials import arms  # noqa: E402

SHORT = ["--rounds", "1", "--prompts", "1", "--prompt-tokens", "12", "--max-tokens", "10"]


@pytest.fixture(scope="module")
def model(checkpoints, tmp_path_factory) -> Path:
    """A tiny MiMo with its head and what mlx-lm's own loader wants besides."""
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    shutil.copytree(checkpoints("mimo"), folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "!"}')
    return folder


def run(script: str, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(FOLDER / f"{script}.py"), *map(str, flags)]
    environment = os.environ | {"MTPLAB_BLAS": "reference"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def document(script: str, *flags: str) -> dict:
    done = run(script, *flags)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    assert any(script in line for line in table), "the table comes before the document"
    found = json.loads(last, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert found["benchmark"] == script and found["failed"] == [] and found["rounds"] == 1
    assert found["machine"]["blas"]["kind"] == "reference" and found["machine"]["mlx"]
    return found


def values(found: dict) -> dict[str, float | None]:
    return {r["name"]: r["value"] for r in found["ratios"]}


# The scripts -------------------------------------------------------------------------------------------------------


def test_baseline_against_mlx_lm(model):
    found = document("baseline_vs_mlx_lm", "--model", model, *SHORT)
    assert found["tokens_equal"] is True
    assert set(found["sides"]) == {"mtplab", "mtplab_text", "mlx_lm_step", "mlx_lm_stream"}
    assert all(row["tokens"] == 10 for row in found["samples"][0].values())
    rates = {s: row["tok_s"] for s, row in found["sides"].items()}
    assert values(found)["loop / stream_generate"] == pytest.approx(rates["mtplab"] / rates["mlx_lm_stream"])


def test_loop_cost_writes_the_trace_only_where_it_is_on(model):
    found = document("loop_cost", "--model", model, *SHORT, "--traced", "depth1")
    rows = found["samples"][0]
    assert set(rows) == {"baseline", "depth0", "depth1", "depth1_traced"}
    assert rows["depth1_traced"]["trace_bytes"] > 500
    assert rows["depth1"]["trace_bytes"] == 0
    assert values(found)["depth0 / baseline"] == pytest.approx(rows["depth0"]["tpot_ms"] / rows["baseline"]["tpot_ms"])


def test_predicted_names_what_it_measured(model):
    found = document("predicted", "--model", model, *SHORT, "--depths", "1")
    side, costs = found["sides"]["depth1"], found["costs"][0]
    assert side["measured_over_predicted"] == pytest.approx(side["measured"] / side["predicted"])
    assert side["pass_ms_predicted"] == pytest.approx(costs["pass_ms"]["1"])
    assert values(found) == {"depth1, measured / predicted ratio": side["measured_over_predicted"]}


def test_the_price_of_exactness_comes_with_its_promise(model):
    """On the reference BLAS every way equals its baseline; the price has no limit to miss."""
    found = document("exact_verify", "--model", model, *SHORT, "--depth", "2")
    for way in ("batched", "rowwise", "fixed", "serial"):
        side = found["sides"][way]
        assert side["equal_to_baseline"] == side["prompts"] == 1 and side["verify_ms"] > 0
    assert all(r["met"] is None and r["value"] > 0 for r in found["ratios"])


def test_a_diagnosis_is_held_against_the_same_prompts_beside_it_and_in_a_process_of_their_own(model):
    found = document("diagnosis_cost", "--model", model, *SHORT)
    rows, sides = values(found), found["samples"][0]
    diverge, baseline = sides["diverge"], sides["baseline"]
    assert baseline["tokens"] == 2 * 10 and diverge["tokens"] == 6 * baseline["tokens"]  # two corpora, six arms
    assert rows["diagnosis / baseline beside it, time"] == pytest.approx(diverge["wall_s"] / diverge["beside_wall_s"])
    ratio = rows["diagnosis / baseline pass of its own, time"]
    assert ratio == pytest.approx(diverge["wall_s"] / baseline["wall_s"])


def test_exactness_is_counted_in_rows(model):
    done = run("exact_equality", "--model", model, "--prompts", "2", "--prompt-tokens", "8", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout.splitlines()[-1])["ways"].values():
        assert row["rows_equal"] == row["rows"] == 22


def test_memory_does_not_grow_beyond_the_caches(model):
    found = document("memory", "--model", model, *SHORT, "--passes", "5", "300", "--depth", "2")
    grown = found["sides"]["grown"]
    # 300 passes are more than 256 rows: the caches themselves did grow.
    assert grown["cache_bytes"][1] > grown["cache_bytes"][0]
    assert abs(grown["beyond_caches_bytes"]) < 20_000


def test_memory_says_when_the_context_is_too_short(checkpoints):
    done = run("memory", "--model", checkpoints("mimo", max_position_embeddings=64), *SHORT, "--passes", "5", "60")
    assert done.returncode == 4
    assert "context of 64 tokens was full before 60 passes; lower --passes" in done.stderr


def test_all_of_them_become_one_document(monkeypatch, capsys):
    ratios = [{"name": "good", "met": True}, {"name": "bad", "met": False}, {"name": "reported", "met": None}]

    def fake(script: str, flags: list[str]) -> tuple[int, dict | None]:
        assert (flags[:2] == ["--model", "m"] and "--rounds" in flags) or script == "memory"
        return (4, None) if script == "memory" else (0, {"benchmark": script, "ratios": ratios})

    monkeypatch.setattr(everything, "run", fake)
    monkeypatch.setattr(sys, "argv", ["run.py", "--model", "m", "--quick"])
    assert everything.main() == 4
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [d["benchmark"] for d in found["benchmarks"]] == [
        "baseline_vs_mlx_lm",
        "loop_cost",
        "predicted",
        "exact_verify",
    ]
    assert found["missed"] == [f"{d}: bad" for d in ("baseline_vs_mlx_lm", "loop_cost", "predicted", "exact_verify")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "nowhere"], "--model nowhere has no folder"),
        (["--rounds", "0"], "'0' is not a whole number of at least 1"),
        (["--rings", "3"], "unrecognized arguments: --rings"),
    ],
)
def test_bad_flags_are_one_sentence_and_exit_2(model, flags, said):
    done = run("loop_cost", "--model", model, *flags)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_failed_rounds_are_left_out_and_listed(model):
    done = run("predicted", "--model", model, *SHORT, "--corpus", "poems")
    assert done.returncode == 4
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rounds"] == 0 and "--corpus poems is not bundled" in found["failed"][0]["reason"]
    assert found["ratios"] == []


# The arithmetic ----------------------------------------------------------------------------------------------------


def test_pairs_stand_in_both_orders():
    for r in (0, 2, 4):
        assert common.order("abcd", r) == common.order("abcd", r + 1)[::-1]
    assert len({tuple(common.order("abcd", r)) for r in range(20)}) > 4


def test_an_incomplete_round_is_no_round(monkeypatch):
    def side(name: str, round_: int, timeout: int) -> dict:
        if (name, round_) == ("b", 1):
            raise common.SideFailed("killed")
        return {"x": round_}

    monkeypatch.setattr(common, "run_side", side)
    complete, failed = common.interleaved(["a", "b"], 3, 1)
    assert [r["a"]["x"] for r in complete] == [0, 2]
    assert failed == [{"round": 1, "side": "b", "reason": "killed"}]


def test_the_ratio_is_taken_within_a_round():
    # The machine was slow in two rounds; the ratio of the medians would be 8 / 10.
    rounds = [{"a": {"t": a}, "b": {"t": b}} for a, b in ((15.0, 10.0), (3.0, 2.0), (8.0, 10.0))]
    found = common.compare(rounds, common.Wanted("a / b", "a", "b", "t", "at most", 1.4))
    assert (found["value"], found["low"], found["high"], found["rounds"]) == (1.5, 0.8, 1.5, 3)
    assert found["met"] is False and found["clear"] is False


def test_a_verdict_within_noise_is_not_clear():
    assert common.verdict([0.9, 1.0, 1.1, 1.2], "at least", 1.0) == {
        "wanted": "at least 1.0",
        "met": True,
        "clear": False,
    }
    assert common.verdict([0.94], "within", 0.05)["met"] is False
    assert common.verdict([], "at least", 1.0)["met"] is None


def test_sides_on_different_libraries_are_not_compared():
    with pytest.raises(RequestError, match="differ in their BLAS"):
        common.same([{"a": {"blas": "x"}, "b": {"blas": "y"}}], "blas", "their BLAS")


def test_the_first_token_belongs_to_the_prefill(monkeypatch):
    ticks = iter([1_000, 1_400, 2_000])
    monkeypatch.setattr(common.time, "perf_counter_ns", lambda: next(ticks))
    span = common.Span.of([1, 3, 2])
    assert (span.tokens, span.wall_ns) == (5, 1_000)


def test_a_busy_machine_is_named(monkeypatch):
    monkeypatch.setattr(common.machine, "cores", lambda: 2)
    assert common.busy([0.4, 0, 0]) == []
    assert "load average was 0.6 on 2 cores" in common.busy([0.6, 0, 0])[0]


def test_nan_becomes_null(capsys):
    found = {"name": "x", "value": math.nan, "low": None, "high": math.inf, "wanted": None, "met": None, "clear": None}
    output.emit({"benchmark": "b", "model": "m", "rounds": 1, "machine": {"load_average": {"before": None}},
                 "ratios": [found], "failed": [], "warnings": []})  # fmt: skip
    ratio = json.loads(capsys.readouterr().out.splitlines()[-1])["ratios"][0]
    assert ratio["value"] is None and ratio["high"] is None


# Pieces ------------------------------------------------------------------------------------------------------------


def test_calibration_feeds_ids_of_the_vocabulary_only(load, monkeypatch):
    fed, forward = [], Target.forward
    monkeypatch.setattr(
        Target, "forward", lambda self, ids, cache: fed.append(ids.tolist()) or forward(self, ids, cache)
    )
    arms.calibrate(load("mimo", build={"vocab_size": 61}), repeats=1, rows=120)
    assert max(max(ids) for ids in fed) < 61


def test_a_calibrated_pass_is_the_sum_of_its_parts(load):
    costs = arms.calibrate(load("mimo"), max_depth=2, repeats=3, rows=24)
    assert set(costs["verify_ms"]) == {1, 2, 3} and set(costs["draft_ms"]) == {1, 2}
    assert costs["verify_ms"][1] == costs["pass_ms"][0] > 0
    for k in (1, 2):
        total = costs["draft_ms"][k] + costs["verify_ms"][k + 1] + costs["host_ms"]
        assert total == pytest.approx(costs["pass_ms"][k])
    # Fenced and in place are two measurements of one draft: at depth 1 they are the same by definition.
    assert costs["draft_ms"][1] == pytest.approx(costs["fenced"]["draft_ms"][1])


def test_calibration_fits_into_a_short_context_and_needs_no_head(load):
    assert arms.calibrate(load("mimo", build={"max_position_embeddings": 40}), repeats=2, rows=500)["rows"] == 20
    costs = arms.calibrate(load("llama"), repeats=2, rows=24)
    assert costs["draft_ms"] == {} and costs["host_ms"] == 0 and set(costs["verify_ms"]) == {1, 2, 3, 4}


def test_growth_is_judged_in_shares_of_the_weights():
    peak = {"peak_bytes": 1040, "weight_bytes": 900, "cache_bytes": 100}
    grown = {"beyond_caches_bytes": 45, "weight_bytes": 900}
    ratios = memory.extra(argparse.Namespace(passes=[5, 50]), [{"peak": peak, "grown": grown}])["ratios"]
    assert [r["value"] for r in ratios] == [1.04, 1.05] and [r["met"] for r in ratios] == [True, False]


def test_predicted_sides_follow_the_depths():
    assert predicted.sides(argparse.Namespace(depths=[2, 5])) == ["calibrate", "baseline", "depth2", "depth5"]


def test_a_converted_folder_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "fetch", lambda into: pytest.fail("nothing may be fetched"))
    folder = tmp_path / smollm2.FOLDER
    folder.mkdir()
    (folder / smollm2.DONE).write_text("{}")
    assert smollm2.smollm2(tmp_path) == folder


def test_a_broken_wheel_leaves_nothing_behind(tmp_path):
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"no archive")
    done = run("smollm2", tmp_path / "cache", "--wheel", wheel)
    assert done.returncode == 3 and "is not a readable wheel" in done.stderr and "Traceback" not in done.stderr
    assert list((tmp_path / "cache").iterdir()) == []
