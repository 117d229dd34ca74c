"""Tables, plots and page of a `denoise` run folder written by hand: right numbers, nothing unescaped, any format."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from canvas_builders import canvas_request

from mtplab.errors import RequestError
from mtplab.report import canvas_page, canvas_plots
from mtplab.report.canvas_results import load_results, rendered
from mtplab.report.results import load_results as load_sweep
from mtplab.trials.canvas_plan import DenoisePlan
from mtplab.trials.corpus import Prompt
from mtplab.trials.files import dumps
from mtplab.trials.plan import order
from mtplab.trials.store import create, open_run

NASTY = "</pre><script>alert(1)</script> & \x1b[31m"


def build(folder, *, steps=(4, 16), corpora=("novel", "c"), seeds=2, only=None, hint="novel/0", text="Once "):
    plan = DenoisePlan(model="somewhere/tiny", corpora=corpora, steps=steps, seeds=seeds, prompts=2)
    names = {("novel", 0): hint}
    prompts = [Prompt(names.get((c, i), f"{c}/{i}"), c, (1, 2, 3), text) for c in corpora for i in (0, 1)]
    manifest = {
        "model": {"model": "tiny"}, "machine": {"cpu": "test", "cores": 2, "os": "linux"}, "notices": ["a notice"],
        "blas": {"name": "none", "threads": 1}, "effective": {}, "created": "today",
    }  # fmt: skip
    store = create(folder, plan, prompts=prompts, manifest=manifest, costs={})
    for trial in order(plan):
        if only is not None and trial.arm not in only:
            store.fail(trial, {"reason": "it broke", "kind": "crash"})
            continue
        count = plan.cells[trial.arm].steps
        made = [_request(p, count, trial).to_json() for p in prompts]
        lines = [dumps({"request": r, "pieces": [NASTY, "b", "c", "d"]}) for r in made]
        done = {"arm": trial.arm, "round": trial.round, "load": {"alive": True, "disturbed": False}, "wall_s": 1.0}
        store.part(trial).write_text("\n".join([*lines, dumps({"done": done})]) + "\n")
        store.complete(trial)
    return folder


def _request(prompt, steps, trial):
    tokens = [[1, 2, 3, 4]] if steps == 16 else [[1, 2, 2, 2]]
    # Code loses much with 4 steps, the novel nothing.
    lost = 4.0 if prompt.corpus == "c" and steps == 4 else 0.0
    made = canvas_request(
        tokens, steps=min(steps, 9), cap=steps, id=prompt.id, corpus=prompt.corpus, seed=trial.round,
        nll=8.0 + lost + 0.5 * trial.round, settled=[1, 2, min(3, steps), min(4, steps)],
    )  # fmt: skip
    return replace(made, settings={**made.settings, "arm": trial.arm, "round": trial.round})


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return load_results(build(tmp_path_factory.mktemp("runs") / "run"))


def test_the_document_says_what_the_issue_of_a_run_needs(results):
    document = json.loads(rendered(results, "json"))
    assert rendered(results, "json").count("\n") == 1
    assert {"schema", "run", "rows", "recommended_steps"} <= set(document)
    row = document["rows"][0]
    keys = "corpus steps sampler canvas prompts seeds tok_s tokens_per_forward steps_used cap_share agreement"
    assert {*keys.split(), "nll", "edit_distance"} <= set(row)
    assert {"value", "low", "high"} <= set(row["agreement"])
    assert [(r["corpus"], r["steps"]) for r in document["rows"]] == [("novel", 4), ("novel", 16), ("c", 4), ("c", 16)]
    assert document["recommended_steps"] == 16, "the code needs 16"
    # distinct_2 of 1 2 2 2 is 2/3 against 1 and repetition 2/3 against 0: a loss whatever the likelihood says.
    assert [r["steps"] for r in document["recommendations"]] == [16, 16]


def test_every_format_holds_the_same_rows(results):
    rows = list(csv.DictReader(io.StringIO(rendered(results, "csv"))))
    assert [r["steps"] for r in rows] == ["4", "16", "4", "16"]
    assert float(rows[0]["agreement"]) == 0.5 and float(rows[0]["nll_low"]) <= float(rows[0]["nll"])
    assert [json.loads(x)["steps"] for x in rendered(results, "jsonl").splitlines()] == [4, 16, 4, 16]
    table = rendered(results, "table")
    assert "tokens_per_forward" in table and "novel, entropy:0.1, canvas 4: 16 steps" in table
    assert rendered(results, "md").startswith("| corpus |")


def test_failed_trials_are_in_no_row_and_listed(tmp_path):
    results = load_results(build(tmp_path / "run", only=("steps16",)))
    assert [r["steps"] for r in results.rows] == [16, 16] and len(results.failed) == 2
    assert "it broke" in rendered(results, "table") and "it broke" in canvas_page.page(results)
    assert json.loads(rendered(results, "json"))["recommended_steps"] is None


def test_a_run_without_any_trial_has_a_page_all_the_same(tmp_path):
    results = load_results(build(tmp_path / "run", only=()))
    assert results.rows == [] and "No trial is complete yet" in canvas_page.page(results)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_the_page_is_one_file_and_nothing_in_it_runs(tmp_path):
    path = canvas_page.write(load_results(build(tmp_path / "run", hint="<img src=x onerror=y>", text=NASTY)))
    html = path.read_text()
    tags = Tags()
    tags.feed(html)
    names = {t for t, _ in tags.found}
    assert not names & {"script", "img", "link", "iframe", "object"}
    assert not [a for _, a in tags.found if any(k.startswith("on") for k in a)]
    assert not re.search(r'(?:src|href)="(?!#|data:image/png)', html)
    assert html.count("<svg") == 4 and "&lt;script&gt;" in html and "Steps used" in html


def test_the_pictures_show_the_cap_and_the_settling(results):
    plots = canvas_plots.all_plots(results)
    assert list(plots) == [
        "Quality against tokens per forward", "Steps used", "When each position settled", "Entropy by step",
    ]  # fmt: skip
    assert "0 % at the cap" in plots["Steps used"] and "tokens_per_forward" in next(iter(plots.values()))
    ids = [i for svg in plots.values() for i in re.findall(r'\bid="([^"]+)"', svg)]
    assert len(ids) == len(set(ids))


def test_the_orange_of_the_histogram_is_the_share_at_the_cap(tmp_path, monkeypatch):
    """Two canvases used all 4 steps: one was stopped by the cap, one stopped by itself in its last step."""
    results = load_results(build(tmp_path / "run", steps=(4,), corpora=("novel",), seeds=1))
    first, second = results.requests
    alone = replace(second, canvases=(replace(second.canvases[0], stop="stable"),))
    assert (first.canvases[0].stop, first.canvases[0].steps, second.canvases[0].steps) == ("cap", 4, 4)
    figures = []
    monkeypatch.setattr(canvas_plots, "svg", lambda figure, name: figures.append(figure) or "")
    canvas_plots.histogram(replace(results, requests=[first, alone]))
    (axis,) = figures[0].axes
    heights = {tuple(round(255 * c) for c in p.get_facecolor()[:3]): p.get_height() for p in axis.patches}
    assert heights[0xD5, 0x5E, 0x00] == 1 and sorted(heights.values()) == [1, 2]
    assert [t.get_text() for t in axis.texts] == ["50 % at the cap"]
    assert "Orange: canvases at the cap" in canvas_page.page(results)


def test_plots_without_matplotlib_are_a_sentence(results, monkeypatch):
    def missing():
        raise RequestError("plots need matplotlib")

    monkeypatch.setattr(canvas_plots, "drawing", missing)
    assert "plots need matplotlib" in canvas_page.page(results)


def test_a_run_of_another_verb_is_not_read(tmp_path):
    folder = build(tmp_path / "run")
    with pytest.raises(RequestError, match="is a run of `mtplab denoise`"):
        load_sweep(folder)
    with pytest.raises(RequestError, match="is a run of `mtplab denoise`"):
        open_run(folder, kind="sweep")


def test_a_damaged_line_is_named(tmp_path):
    folder = build(tmp_path / "run")
    path = next((folder / "trials").glob("000-*.jsonl"))
    path.write_text(path.read_text().replace('"kind": "canvas"', '"kind": "verify"', 1))
    with pytest.raises(RequestError, match="is damaged"):
        load_results(folder)
