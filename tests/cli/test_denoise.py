"""`mtplab denoise` as a person meets it: comparing, one prompt, and what is refused."""

from __future__ import annotations

import json

import canvas_tiny
import pytest

from mtplab import cli
from mtplab.cli import demo
from mtplab.trials import canvas_plan

TOKENS = 14  # one canvas of 12 and two tokens of the next


@pytest.fixture
def call(capfd):
    def run(*arguments):
        code = cli.main([str(a) for a in arguments])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    generation = {"t_max": 0.9, "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.5}}
    settings = canvas_tiny.config("gemma")
    weights = canvas_tiny.file_names(canvas_tiny.random_weights(settings))
    return canvas_tiny.write(tmp_path_factory.mktemp("models") / "gemma", settings, weights, generation)


@pytest.fixture(scope="module")
def llada(tmp_path_factory):
    return canvas_tiny.build(tmp_path_factory.mktemp("models") / "llada", "llada")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "prompt": f"abc{i}(x)" * 2}) + "\n" for i in range(2)))
    return path


# Comparing ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(gemma, texts, tmp_path_factory):
    """One small run: two numbers of steps, two seeds; its folder and what `-o json` printed."""
    import contextlib
    import io

    folder, printed = tmp_path_factory.mktemp("runs") / "run", io.StringIO()
    plan = folder.with_name("plan.toml")
    plan.write_text("steps = [9]\nrepeat_disturbed = false\nignore_eos = true\n")
    with contextlib.redirect_stdout(printed):
        code = cli.main([
            "denoise", "--model", str(gemma), "--corpus", str(texts), "--steps", "2,5", "--seeds", "2", "--prompts",
            "2", "-m", str(TOKENS), "--plan", str(plan), "--out", str(folder), "-o", "json", "--quiet",
        ])  # fmt: skip
    assert code == 0
    return folder, printed.getvalue()


def test_a_run_ends_with_one_document_and_a_page(compared):
    folder, printed = compared
    document = json.loads(printed.splitlines()[-1])
    assert [r["steps"] for r in document["rows"]] == [2, 5] and "recommended_steps" in document
    for row in document["rows"]:
        assert (row["prompts"], row["seeds"], row["tokens"]) == (2, 2, 4 * TOKENS)
        assert row["forwards"]["commit"] == 4 and row["forwards"]["denoise"] <= 8 * row["steps"]
        assert row["nll"]["value"] > 0 and row["steps_used"] <= row["steps"]
    assert document["rows"][0]["agreement"]["value"] < 1
    effective = document["effective"]["steps2"]
    assert effective["bound"] == 0.5 and effective["sampler"] == "entropy:0.5"
    assert effective["sources"]["bound"] == "checkpoint: generation_config.json: sampler_config.entropy_bound"
    assert effective["sources"]["steps"] == "request" and effective["sources"]["t_min"] == "reference"
    assert (folder / "page.html").is_file()


def test_requested_is_effective_in_every_record(compared):
    folder, _ = compared
    for path in (folder / "trials").glob("*.jsonl"):
        *lines, last = map(json.loads, path.read_text().splitlines())
        effective = last["done"]["effective"]
        for line in lines:
            settings = line["request"]["settings"]
            assert {k: settings[k] for k in effective} == effective and settings["max_tokens"] == TOKENS
            assert settings["seed"] == settings["round"]
            assert len(line["pieces"]) == TOKENS


def test_arms_of_one_seed_begin_with_the_same_canvases_and_seeds_differ(compared):
    folder, _ = compared
    first = {}
    for path in (folder / "trials").glob("*.jsonl"):
        line = json.loads(path.read_text().splitlines()[0])["request"]
        step = line["steps"][0]
        first[line["settings"]["steps"], line["settings"]["seed"]] = (step["mean_entropy"], step["temperature"])
    # The first step's temperature is t_max in both, so the same canvas gives the same entropy to the last bit.
    assert first[2, 0] == first[5, 0] and first[2, 1] == first[5, 1] and first[2, 0] != first[2, 1]


def test_a_finished_run_prints_the_same_again_and_another_plan_is_refused(compared, call):
    folder, printed = compared
    code, again, _ = call("denoise", "--resume", "--out", folder, "-o", "json", "--quiet")
    assert code == 0 and json.loads(again) == json.loads(printed)
    code, _, err = call("denoise", "--resume", "--out", folder, "--steps", "3")
    assert code == 2 and "another plan (steps: [2, 5] -> [3])" in err
    code, _, err = call("sweep", "--resume", "--out", folder)
    assert code == 2 and "is a run of `mtplab denoise`" in err
    code, _, err = call("denoise", "--out", folder)
    assert code == 2 and "exists already" in err


# One prompt ---------------------------------------------------------------------------------------------------------


def one(model, *more):
    return ("denoise", "--model", model, "-p", "abcabc", "--steps", 4, "-m", TOKENS, *more)


def test_text_json_records_and_drawing_agree(gemma, call):
    code, text, err = call(*one(gemma))
    assert code == 0 and "14 tokens in 2 canvases of 12" in err and "steps used" in err
    assert "steps 4 (request)" in err and "t_max 0.9 (checkpoint: generation_config.json: t_max)" in err
    document = json.loads(call(*one(gemma, "-o", "json"))[1])
    assert document["text"] + "\n" == text and len(document["tokens"]) == TOKENS
    assert document["settings"]["sources"]["t_max"].startswith("checkpoint")
    assert document["statistics"]["forwards"]["commit"] == 1
    records = [json.loads(x) for x in call(*one(gemma, "-o", "jsonl"))[1].splitlines()]
    kinds = [r["record"] for r in records]
    assert kinds[0] == "prefill" and kinds.count("canvas") == 2 and kinds[-1] == "canvas"
    assert "".join(r["text"] for r in records) == document["text"]
    first = kinds.index("canvas")
    assert records[first]["text"] and kinds.index("denoisestep", first) > first, "shown before the next begins"
    code, drawn, err = call(*one(gemma, "--show", "--color", "always"))
    assert drawn == text and "step 1, " in err and "\x1b[2m" in err
    assert "\x1b" not in call(*one(gemma, "--show"))[2], "not a terminal: no drawing"


def test_the_seed_and_nothing_else_changes_the_text(gemma, call):
    def tokens(*more):
        return json.loads(call(*one(gemma, "-o", "json", *more))[1])["tokens"]

    base = tokens()
    assert tokens() == base and tokens("--seed", 1) != base
    longer = json.loads(call("denoise", "--model", gemma, "-p", "abcabc", "--steps", 4, "-m", 20, "-o", "json")[1])
    assert longer["tokens"][:TOKENS] == base, "a longer request begins with the same text"


def test_a_masked_denoiser_runs_through_the_same_verb(llada, call):
    code, out, err = call("denoise", "--model", llada, "-p", "abcabc", "--steps", 4, "-m", 10, "-o", "json")
    assert code == 0, err
    document = json.loads(out)
    assert document["settings"]["renoise"] == "mask" and document["settings"]["accept"] == "confidence"
    assert len(document["tokens"]) == 10
    for canvas in document["canvases"]:
        news = [s["new"] for s in document["steps"] if s["canvas"] == canvas["index"]]
        assert sum(news) == canvas["length"] and min(news) >= 1


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--steps", 0), "--steps 0 is out of range"),
        (("--steps", "4,x"), "--steps '4,x' is not a comma list of whole numbers"),
        (("--steps", "4,4"), "steps names 4 twice"),
        (("--canvas", 0), "--canvas 0 is out of range"),
        (("--canvas", -3), "--canvas -3 is out of range"),
        (("--sampler", "magic"), "unknown sampler 'magic'"),
        (("--threshold", 0.9), "--threshold needs --sampler"),
        (("--sampler", "confidence", "--threshold", "1.2"), "--threshold 1.2 is out of range"),
        (("--sampler", "entropy:0.1", "--threshold", "0.2"), "has a threshold of its own"),
        (("--t-max", 0), "--t-max 0.0 is out of range"),
        (("--t-min", 3, "--t-max", 1), "--t-min 3.0 is out of range"),
        (("--confidence", -1), "--confidence -1.0 is out of range"),
        (("--stability", -1), "--stability -1 is out of range"),
        (("--seeds", 0), "seeds is 0"),
        (("--show",), "--show is for one prompt"),
        (("-p", "x", "--seeds", 3), "--seeds is for comparing"),
        (("-p", "x", "--steps", "4,8"), "--steps has 2 values"),
        (("-p", "x", "-o", "csv"), "output format 'csv'"),
        (("-p", "x", "--file", "y"), "use one of them"),
        (("-p", ""), "the prompt is empty"),
        (("--resume",), "--resume needs --out"),
        (("-o", "xml"), "output format 'xml'"),
        (("--plan", "/no/such.toml"), "cannot be read"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_exit_code_2(call, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("denoise", *arguments)
    assert code == 2 and out == "", err
    assert words in err and err.startswith("mtplab: ") and err.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--canvas", 13), "--canvas 13 is above this model's 12; use 1 to 12"),
        (("--renoise", "mask"), "needs a denoiser with a mask token"),
        (("-m", 5000), "do not fit the model's context"),
    ],
)
def test_what_the_model_cannot_honour_is_refused_after_loading(call, gemma, arguments, words):
    code, out, err = call("denoise", "--model", gemma, "-p", "abc", *arguments)
    assert code == 2 and out == "" and words in err.splitlines()[-1]


def test_a_run_that_cannot_be_is_refused_before_it_begins(call, gemma, texts, tmp_path):
    out = tmp_path / "run"
    code, printed, err = call("denoise", "--model", gemma, "--corpus", texts, "--canvas", "12,13", "--out", out, "-q")
    assert code == 2 and printed == "" and "--canvas 13 is above this model's 12" in err and not out.exists()


def test_each_kind_of_checkpoint_goes_to_its_own_verb(call, gemma, checkpoints, texts):
    other = checkpoints("llama")
    for arguments in (("-p", "x"), ("--corpus", texts, "-q")):
        code, out, err = call("denoise", "--model", other, *arguments)
        assert code == 3 and out == "" and "no canvas model" in err.splitlines()[-1], err
    for arguments in (("generate", "-p", "x"), ("sweep", "--corpus", texts, "-q")):
        code, out, err = call(*arguments, "--model", gemma)
        assert code == 3 and out == "" and "mtplab denoise" in err.splitlines()[-1], err


# Demo ---------------------------------------------------------------------------------------------------------------


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
    canvas_plan.DenoisePlan(**demo.CANVAS)
