"""A diagnosis in words and as a page: bounded claims, nothing unescaped, nulls instead of NaN."""

from __future__ import annotations

import json

import pytest
import tiny

from mtplab.backend import numerics
from mtplab.decode.settings import Settings
from mtplab.diagnose.candidates import Candidate
from mtplab.diagnose.diverge import Diagnoser, Text
from mtplab.diagnose.locate import locate
from mtplab.diagnose.summary import document
from mtplab.report import divergence
from mtplab.report.divergence_page import page

ARMS = [Candidate("depth0", "none", 0), Candidate("scripted3", "scripted", 3)]


@pytest.fixture(scope="module")
def found(load):
    """(equal, numeric): documents of a sound model, and of one under simulated noise that flips tokens."""
    loaded = load("llama")
    texts = [Text("<b>p</b>", tuple(tiny.prompt(3, 20))), Text("q", tuple(tiny.prompt(4, 20)))]
    diagnoser = Diagnoser(loaded.target, settings=Settings(max_tokens=64), locate=locate)
    equal = document(diagnoser.run(texts, ARMS))
    with numerics.simulate(loaded.target, "noise:2e-2@layers.1.mlp.down_proj") as made:
        numeric = document(diagnoser.run(texts, ARMS, simulated=made.name))
    return equal, numeric


def test_equality_is_bounded(found):
    text = divergence.render(found[0], "table")
    assert "all 2 arms equal through 64 tokens over 2 prompts" in text
    assert "looked at 64 tokens of 2 prompts" in text and "lossless" not in text


def test_the_evidence_is_printed_with_the_verdict(found):
    numeric = found[1]
    assert numeric["verdict"] == "numeric" and numeric["first_module"] == "model.layers.1.mlp.down_proj"
    text = divergence.render(numeric, "table")
    for part in (
        "numeric:",
        "baseline run twice: the same",
        "depth0",
        "noise of the logits by rows at once",
        "first module that computes other bits: model.layers.1.mlp.down_proj",
        "made, not measured: simulated: noise of 0.02",
    ):
        assert part in " ".join(text.split()), part  # fmt: skip
    assert numeric["noise_by_width"]["1"] == 0 and numeric["gap"] <= 2 * numeric["noise"]
    assert numeric["first_divergence"] == min(d["position"] for d in numeric["divergences"])


@pytest.mark.parametrize("form", ["table", "md", "csv", "json", "jsonl"])
def test_every_format_is_whole_and_strict(found, form):
    for document_ in found:
        text = divergence.render(document_, form)
        assert text.endswith("\n") and "NaN" not in text and "Infinity" not in text
        if form == "json":
            keys = {"verdict", "first_divergence", "compared", "gap", "noise", "first_module", "explained_by",
                    "controls", "state"}  # fmt: skip
            assert keys <= set(json.loads(text))
        if form == "jsonl":
            assert [json.loads(line)["arm"] for line in text.splitlines()] == ["depth0", "scripted3"]


def test_the_page_is_self_contained_and_escaped(found):
    for document_ in found:
        text = page(document_)
        assert (
            "<b>p</b>" not in text and "<script" not in text and "http://" not in text.replace("http://www.w3.org", "")
        )
        assert text.count("<svg") == (3 if document_["verdict"] == "numeric" else 2)
    assert "&lt;b&gt;p&lt;/b&gt;" in page(found[1])


def test_what_did_not_happen_is_said(found):
    thin = found[0] | {
        "looked": found[0]["looked"] | {"full_acceptance": 0, "has_window": True, "window_wrapped": False}
    }
    text = " ".join(divergence.bounds(thin))
    assert "no full acceptance happened" in text and "NEVER full" in text


def test_files_are_written_whole(found, tmp_path):
    path = divergence.write(found[1], tmp_path / "out")
    assert (
        path.name == "page.html" and json.loads((tmp_path / "out" / "diverge.json").read_text())["verdict"] == "numeric"
    )
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["diverge.json", "page.html"]
