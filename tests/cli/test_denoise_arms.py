"""What `denoise` makes of a checkpoint's own sampler, of arms that would be one, and of a scoring model."""

from __future__ import annotations

import json

import canvas_tiny
import pytest


@pytest.fixture(scope="module")
def canvas_model(tmp_path_factory):
    """`canvas_model(generation)` -> folder of a tiny canvas model with this generation_config.json."""
    settings = canvas_tiny.config("gemma")
    weights = canvas_tiny.file_names(canvas_tiny.random_weights(settings))
    return lambda generation=None: canvas_tiny.write(
        tmp_path_factory.mktemp("models") / "gemma", settings, weights, generation
    )


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "prompt": f"abc{i}(x)" * 2}) + "\n" for i in range(2)))
    return path


def records(call, model, *more):
    code, out, err = call("denoise", "--model", model, "-p", "abcabc", "-m", 3, "-o", "jsonl", *more)
    assert code == 0, err
    return [r for r in map(json.loads, out.splitlines()) if r["record"] == "denoisestep"], err


def test_a_schedule_of_the_checkpoint_may_go_to_0(canvas_model, call):
    model = canvas_model({"t_max": 0.8, "t_min": 0, "stability_threshold": 9})
    steps, err = records(call, model, "--steps", 4)
    assert "t_min 0.0 (checkpoint: generation_config.json: t_min)" in err
    assert [s["temperature"] for s in steps] == pytest.approx([0.8, 0.6, 0.4, 0.2])


UNKNOWN = {"sampler_config": {"_cls_name": "FancySamplerConfig", "entropy_bound": 7.5}}


def test_a_sampler_of_the_checkpoint_that_is_not_known_is_refused_until_one_is_chosen(canvas_model, call):
    model = canvas_model(UNKNOWN)
    code, out, err = call("denoise", "--model", model, "-p", "abcabc", "-q")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith(
        "mtplab: the checkpoint wants the sampler FancySamplerConfig (generation_config.json: "
        "sampler_config._cls_name), which mtplab does not know; choose one with --sampler: entropy, "
    )
    _, err = records(call, model, "--steps", 1, "--sampler", "entropy")
    assert "bound" not in err, "a number of that sampler says nothing about this one"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--sampler", "entropy,argmax", "--proposal", "argmax"),
            "--proposal argmax is not what --sampler entropy means",
        ),
        (
            ("--sampler", "confidence:0.9,confidence"),
            "the arms steps4-confidence_0.9 and steps4-confidence mean the same here (4, confidence:0.9, 12); drop one",
        ),
        (("--sampler", "entropy:0.5,entropy"), "mean the same here (4, entropy:0.5, 12); drop one"),
    ],
)
def test_two_arms_that_would_be_one_are_refused(canvas_model, texts, call, tmp_path, flags, words):
    model = canvas_model({"sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.5}})
    many = ("--corpus", texts, "--steps", 4, "-q", "--out", tmp_path / "run", *flags)
    code, out, err = call("denoise", "--model", model, *many)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_masked_denoiser_is_scored_by_a_model_that_can_hold_its_text(checkpoints, texts, call, tmp_path):
    model, scorer = canvas_tiny.build(tmp_path / "llada", "llada"), checkpoints("llama", max_position_embeddings=20)
    flags = ("--corpus", texts, "--steps", 2, "--seeds", 1, "--prompts", 1, "--ignore-eos", "-q", "-o", "json")
    flags = ("denoise", "--model", model, "--scorer", scorer, *flags, "--out", tmp_path / "run")
    code, out, err = call(*flags, "-m", 7)
    assert code == 2 and out == "" and err.count("\n") == 1 and not (tmp_path / "run").exists()
    assert "14 prompt tokens and 7 after them do not fit the context of 20 of the scorer" in err
    code, out, err = call(*flags, "-m", 6)
    assert code == 0, err
    assert json.loads(out)["rows"][0]["nll"]["value"] > 0
    line = json.loads(next((tmp_path / "run" / "trials").glob("*.jsonl")).read_text().splitlines()[0])
    assert (line["request"]["scored"], line["request"]["scorer"]) == (6, str(scorer))
