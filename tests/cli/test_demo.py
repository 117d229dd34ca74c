"""`mtplab demo`: two halves, one result, and what is refused before its minutes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from mtplab import cli
from mtplab.cli import demo
from mtplab.errors import ModelError, TrialsFailed
from mtplab.trials import store
from mtplab.trials.canvas_plan import DenoisePlan
from mtplab.trials.plan import Plan


def test_the_demo_has_a_second_half_where_the_model_is_there(monkeypatch, capfd, tmp_path):
    from mtplab.cli import denoise, sweep

    seen = []
    monkeypatch.setattr(sweep, "start", lambda plan, folder, **_: seen.append((plan.kind, folder.name)) or "one")
    monkeypatch.setattr(denoise, "start", lambda plan, folder, **_: seen.append((plan.kind, folder.name)) or "two")
    monkeypatch.setattr(sweep, "finish", lambda store, output, *, show, **_: show('{"rows": [1]}'))
    monkeypatch.setattr(denoise, "finish", lambda store, output, *, show, **_: show('{"rows": [2]}'))
    for there, wanted in ((True, {"rows": [1], "denoise": {"rows": [2]}}), (False, {"rows": [1]})):
        seen.clear()
        monkeypatch.setattr(demo, "has_canvas", lambda there=there: there)
        assert cli.main(["demo", "--out", str(tmp_path / "d"), "-o", "json", "-q"]) == 0
        assert json.loads(capfd.readouterr().out) == wanted
        assert seen == [("sweep", "d"), ("denoise", "d-canvas")][: 1 + there]
    DenoisePlan(**demo.CANVAS)


@pytest.fixture
def halves(monkeypatch):
    """The demo with halves that do nothing but note who was started and finished; `fails` says which one fails how."""
    from mtplab.cli import denoise, sweep

    seen: list[tuple[str, str]] = []
    fails: dict[str, Exception] = {}

    def put(module, kind):
        def start(plan, folder, **_):
            seen.append(("start", kind))
            if isinstance(fails.get(kind), ModelError):
                raise fails[kind]
            folder.mkdir()

        def finish(store, output, *, show, **_):
            seen.append(("finish", kind))
            show(f'{{"row": "{kind}"}}\n')
            if kind in fails:
                raise fails[kind]

        monkeypatch.setattr(module, "start", start)
        monkeypatch.setattr(module, "finish", finish)

    put(sweep, "sweep")
    put(denoise, "denoise")
    monkeypatch.setattr(demo, "has_canvas", lambda: True)
    return SimpleNamespace(seen=seen, fails=fails)


@pytest.mark.parametrize(("taken", "verb"), [("d", "sweep"), ("d-canvas", "denoise")])
def test_the_demo_looks_at_both_folders_before_it_starts(halves, call, tmp_path, taken, verb):
    (tmp_path / taken).mkdir()

    def refused() -> str:
        code, out, err = call("demo", "--out", tmp_path / "d")
        assert code == 2 and out == "" and halves.seen == [] and err.count("\n") == 1
        return err

    said = f"{tmp_path / taken} exists already; choose another --out"
    assert refused() == f"mtplab: {said}\n", "a folder that is no run cannot be gone on with"
    for kind, plan in (("sweep", Plan()), ("denoise", DenoisePlan())):
        (tmp_path / taken).rename(tmp_path / f"before-{kind}")
        store.create(tmp_path / taken, plan, prompts=[], manifest={"machine": {}}, costs={})
        assert (f"{said}, or go on with: mtplab {verb} --resume" in refused()) == (kind == verb)


@pytest.mark.parametrize("which", [("sweep",), ("denoise",), ("sweep", "denoise")])
def test_failed_trials_of_one_half_neither_stop_nor_hide_behind_the_other(halves, call, tmp_path, which):
    halves.fails |= {kind: TrialsFailed(f"2 of 9 of {kind} failed") for kind in which}
    code, out, err = call("demo", "--out", tmp_path / "d", "-o", "json", "-q")
    assert code == 4 and json.loads(out) == {"row": "sweep", "denoise": {"row": "denoise"}}
    assert err == "mtplab: " + "; ".join(f"{k}: 2 of 9 of {k} failed" for k in which) + "\n"


def test_a_demo_whose_second_half_cannot_start_leaves_nothing(halves, call, tmp_path):
    halves.fails["denoise"] = ModelError("the weights are damaged")
    assert call("demo", "--out", tmp_path / "d", "-q") == (3, "", "mtplab: the weights are damaged\n")
    assert halves.seen == [("start", "sweep"), ("start", "denoise")] and not list(tmp_path.iterdir())


def test_the_demo_prints_nothing_that_glues_two_tables(halves, call, tmp_path):
    code, out, _ = call("demo", "--out", tmp_path / "d", "-o", "jsonl", "-q")
    assert code == 0
    assert list(map(json.loads, out.splitlines())) == [
        {"kind": "sweep", "row": "sweep"}, {"kind": "denoise", "row": "denoise"},
    ]  # fmt: skip
    halves.seen.clear()
    code, out, err = call("demo", "--out", tmp_path / "e", "-o", "csv")
    assert code == 2 and out == "" and halves.seen == [] and err.count("\n") == 1
    assert "use -o table, md, json or jsonl" in err
