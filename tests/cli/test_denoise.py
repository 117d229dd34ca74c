"""`mtplab denoise` as a person meets it: comparing, one prompt, and what is refused."""

from __future__ import annotations

import json
import sys

import canvas_tiny
import pytest

from mtplab import cli

TOKENS = 14  # one canvas of 12 and two tokens of the next


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


@pytest.mark.parametrize(("one_of_them", "code"), [("", 2), ("stdout", 0), ("stderr", 0)])
def test_drawings_between_json_lines_are_refused_where_both_meet(gemma, call, monkeypatch, one_of_them, code):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda name=name: one_of_them in ("", name))
    found, out, err = call(*one(gemma, "--show", "-o", "jsonl"))
    assert found == code, err
    if code:
        assert out == "" and err.count("\n") == 1
        assert err.startswith(
            "mtplab: --show and -o jsonl would write over each other here; send one of them to a file"
        )
    else:
        assert [json.loads(x) for x in out.splitlines()] and ("step 1, " in err) == (one_of_them == "stderr")


def test_quiet_leaves_the_text_alone(gemma, call):
    assert call(*one(gemma, "-q")) == (0, call(*one(gemma))[1], "")
    code, out, err = call(*one(gemma, "-q", "--canvas", 13))
    assert code == 2 and out == "" and err.startswith("mtplab: --canvas 13"), "an error is told all the same"


def test_the_settings_line_names_what_decides_something(gemma, call):
    def line(*more):
        return next(x for x in call(*one(gemma, *more))[2].splitlines() if x.startswith("settings: "))

    assert "bound 0.5 (checkpoint: generation_config.json: sampler_config.entropy_bound)" in line()
    other = line("--sampler", "confidence:0.8")
    assert "threshold 0.8 (request)" in other and "bound" not in other, "no entropy bound in this acceptance"


def test_stop_none_runs_every_step_whatever_the_sampler(llada, call):
    arguments = ("-p", "abc", "-m", 8, "--steps", 12, "--sampler", "confidence:0.01", "-o", "json", "-q")
    for stop, stops in (((), [(1, "accepted")]), (("--stop", "none"), [(12, "cap")])):
        code, out, err = call("denoise", "--model", llada, *arguments, *stop)
        assert code == 0, err
        assert {(c["steps"], c["stop"]) for c in json.loads(out)["canvases"]} == set(stops)


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


# The cap of the checkpoint --------------------------------------------------------------------------------------------


@pytest.fixture
def capped(tmp_path):
    """A canvas model of context 64 whose generation_config.json asks for so many new tokens."""

    def build(cap):
        settings = canvas_tiny.config("gemma", text={"max_position_embeddings": 64})
        weights = canvas_tiny.file_names(canvas_tiny.random_weights(settings))
        generation = {"max_new_tokens": cap} if cap else {}
        return canvas_tiny.write(tmp_path / f"cap{cap}", settings, weights, generation)

    return build


FLAGS = ("-p", "abcabc", "--steps", 2, "--ignore-eos", "-o", "json")


def test_the_checkpoints_cap_holds_where_none_is_asked_for(capped, call):
    for flags, cap, source in (
        ((), 15, "checkpoint: generation_config.json: max_new_tokens"),
        (("-m", 13), 13, "request"),
    ):
        code, out, err = call("denoise", "--model", capped(15), *FLAGS, *flags)
        assert code == 0, err
        document = json.loads(out)
        assert len(document["tokens"]) == document["settings"]["max_tokens"] == cap
        assert document["settings"]["sources"]["max_tokens"] == source
        assert f"max_tokens {cap} ({source})" in err
    code, _, err = call("denoise", "--model", capped(None), *FLAGS)
    assert code == 2 and "6 prompt tokens and 72 canvas positions" in err, "64 where nobody says anything"


def test_a_comparison_takes_the_checkpoints_cap_too(capped, texts, call, tmp_path):
    flags = ("--corpus", texts, "--steps", 2, "--seeds", 1, "--prompts", 1, "--ignore-eos", "-q", "-o", "json")
    code, out, err = call("denoise", "--model", capped(15), *flags, "--out", tmp_path / "run")
    assert code == 0, err
    document = json.loads(out)
    assert document["rows"][0]["tokens"] == document["effective"]["steps2"]["max_tokens"] == 15
    source = "checkpoint: generation_config.json: max_new_tokens"
    assert document["effective"]["steps2"]["sources"]["max_tokens"] == source
    lines = next((tmp_path / "run" / "trials").glob("*.jsonl")).read_text().splitlines()
    assert json.loads(lines[0])["request"]["settings"]["max_tokens"] == 15
    assert "tokens in, 15 out" in (tmp_path / "run" / "page.html").read_text()


@pytest.mark.parametrize(
    ("cap", "code", "words"),
    [
        (65, 3, "generation_config.json: max_new_tokens = 65 is above this model's context of 64; give --max-tokens"),
        (60, 2, "lower --max-tokens (now 60, from generation_config.json: max_new_tokens) or shorten the prompt"),
    ],
)
def test_a_cap_of_the_checkpoint_that_does_not_fit_is_named(capped, texts, call, tmp_path, cap, code, words):
    many = ("--corpus", texts, "--steps", 2, "--prompts", 1, "-q", "--out", tmp_path / "run")
    found, out, err = call("denoise", "--model", capped(cap), *FLAGS)
    assert (found, out) == (code, "") and words in err.splitlines()[-1], err
    found, out, err = call("denoise", "--model", capped(cap), *many)
    # Where a prompt is what does not fit beside the cap, that prompt is named.
    assert (found, out) == (code, "") and (words if code == 3 else "lower --max-tokens or --prompt-tokens") in err, err
    assert not (tmp_path / "run").exists()
    assert call("denoise", "--model", capped(cap), *FLAGS, "-m", 5)[0] == 0


def test_room_is_for_whole_canvases_and_checked_before_any_pass(capped, texts, call, tmp_path, monkeypatch):
    """48 tokens are 48 positions in canvases of 12 and 50 in canvases of 10; the context holds 64."""
    from mtplab.models.canvas.gemma import GemmaDenoiser

    model, ran, prefill = capped(None), [], GemmaDenoiser.prefill
    monkeypatch.setattr(GemmaDenoiser, "prefill", lambda *given: ran.append(1) or prefill(*given))
    prompt = ("denoise", "--model", model, "-p", "abcabcabcabcabc", "-m", 48, "--steps", 1)
    code, out, err = call(*prompt, "--canvas", 10)
    assert code == 2 and out == "" and not ran
    assert "15 prompt tokens and 50 canvas positions do not fit the model's context of 64" in err.splitlines()[-1]
    assert call(*prompt, "--canvas", 12)[0] == 0 and ran
    many = ("--corpus", texts, "--prompts", 1, "--steps", 1, "-m", 54, "-q", "--out", tmp_path / "run")
    code, out, err = call("denoise", "--model", model, *many, "--canvas", "9,11")
    assert code == 2 and out == "" and "55 are to follow" in err and not (tmp_path / "run").exists()


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
        (("-p", "x", "-m", 0), "--max-tokens 0 is out of range"),
        (("-m", 0), "max_tokens is 0 but must be at least 1"),
        (("--steps=--5",), "--steps '--5' is not a comma list of whole numbers"),
        (("-p", "x", "--steps=--5"), "--steps '--5' is not a comma list of whole numbers"),
        (("-p", "x", "--seed", -1), "--seed -1 is out of range"),
        (("-p", "x", "--color", "always"), "--color always says how --show draws; give --show, too, or drop it"),
        (("-p", "x", "--show", "--color", "pink"), "--color 'pink' is not one of"),
        (("--color", "never"), "--color is for one prompt"),
        (("-p", "x", "--show", "-q"), "--show draws on stderr and --quiet wants nothing there"),
        (("-p", "x", "--stop-text", ""), "--stop-text is empty"),
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sampler", "entropy:0.5"), "--sampler entropy:0.5 takes tokens back; use confidence or count"),
        (("--sampler", "argmax"), "--sampler argmax takes tokens back; use confidence or count"),
        (("--renoise", "uniform"), "--renoise uniform is not for a masked denoiser"),
        (("--stability", 2), "stability is for --stop stable and the stop here is accepted"),
        (("--t-min", 0.3), "a constant schedule has one temperature"),
        (("--t-max", "1e-300"), "--t-max 1e-300 is out of range"),
        (("--canvas", 9), "--canvas 9 is above this model's 8"),
    ],
)
def test_what_a_masked_denoiser_cannot_honour_is_one_sentence(call, llada, arguments, words):
    code, out, err = call("denoise", "--model", llada, "-p", "abc", "-q", *arguments)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1


def test_a_masked_denoiser_scores_no_text_and_says_so_before_any_trial(call, llada, texts, tmp_path):
    code, out, err = call("denoise", "--model", llada, "--corpus", texts, "-q", "--out", tmp_path / "run")
    assert code == 2 and out == "" and "name a model with --scorer" in err and not (tmp_path / "run").exists()


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
