"""A head is learned, survives every end, and is refused with a sentence where it is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny
import trainlab

from mtplab import cli
from mtplab.decode.quality import agreement
from mtplab.errors import ModelError, RequestError
from mtplab.models import load_target
from mtplab.train import loop, run
from mtplab.train.plan import HeadPlan
from mtplab.trials.progress import Progress

ROOT = Path(cli.__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("trunk") / "llama", "llama")


@pytest.fixture(scope="module")
def whole(llama, tmp_path_factory):
    """A short run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, trainlab.make(out, llama)


@pytest.mark.parametrize("start", ["regression", "random"])
def test_a_predictable_trunk_gets_a_head_that_predicts_it(tmp_path, monkeypatch, start):
    """match above 0.9 at every depth, measured by `decode.quality` on text that was not trained on: where the first
    head is fitted, and where it knows nothing and all must be learned by steps."""
    if start == "random":
        rng = np.random.default_rng(0)
        monkeypatch.setattr(loop, "_ridge", lambda x, y: rng.normal(size=(32, 64)).astype(np.float32) / 8)
    model = trainlab.successor(tmp_path / "m")
    began = time.monotonic()
    made = trainlab.make(tmp_path / "run", model, steps=60, rows=24, gather=12, ffn=64, batch=6)
    assert time.monotonic() - began < 30
    loaded = trainlab.loaded_with(model, tmp_path / "run")
    got = agreement(loaded.target, loaded.head, [(x + 40) % tiny.VOCAB for x in range(60)])
    assert all(m > 0.9 for m in got.match), got.match
    first, last = made["curve"][0], made["curve"][-1]
    assert last["match_own"][2] > 0.9
    if start == "random":
        assert first["match_own"][0] < 0.3 and last["loss"] < 0.2 * made["curve"][1]["loss"]


def test_the_run_folder_and_the_card(whole):
    out, made = whole
    assert {p.name for p in out.iterdir()} == {
        "plan.json", "rows-00000.npy", "rows-00001.npy", "held-out.npy", "state.safetensors", "curve.jsonl", "head"
    }  # fmt: skip
    curve = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    assert curve == made["curve"] and curve[0]["step"] == 0 and curve[-1]["step"] == 12
    assert len(curve) == 1 + loop.CURVE_POINTS and curve[-1]["tokens"] == 12 * 3 * 32
    card, config = ((out / "head" / n).read_text() for n in ("README.md", "config.json"))
    assert "/" not in json.loads(config)["mtplab_head"]["plan"]["model"], "a head is given away without paths"
    for part in (
        f"{made['parameters']:,} parameters",
        "12 rows of 32 tokens",
        "12 steps",
        f"{curve[-1]['match_text'][0]:.3f}",
    ):
        assert part in card


# Stopping and going on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 7])
def test_a_stopped_training_goes_on_as_if_nothing_had_been(tmp_path, llama, whole, monkeypatch, after):
    stop_at(monkeypatch, after)
    with pytest.raises(run.Interrupted, match=r"go on with: mtplab head train --resume --out") as caught:
        trainlab.make(tmp_path / "run", llama)
    assert caught.value.code == 130 and not (tmp_path / "run" / "head").exists()
    monkeypatch.undo()
    trainlab.make(tmp_path / "run", llama, resume=True)
    assert trainlab.head_bytes(tmp_path / "run") == trainlab.head_bytes(whole[0])
    curves = [[without_time(e) for e in lines(f / "curve.jsonl")] for f in (tmp_path / "run", whole[0])]
    assert curves[0] == curves[1]


def stop_at(monkeypatch, step):
    """As if a signal came while that step ran."""
    original = loop.Training.run
    monkeypatch.setattr(
        loop.Training, "run", lambda self, tell, stop: original(self, tell, lambda: self.at.step == step)
    )


def lines(path):
    return [json.loads(x) for x in path.read_text().splitlines()]


def without_time(entry):
    return {k: v for k, v in entry.items() if k != "seconds"}


def spawn(*arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "mtplab.cli", "head", "train", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def flags(plan: dict) -> list[str]:
    return [x for k, v in plan.items() for x in (f"--{k.replace('_', '-')}", str(v))]


@pytest.mark.parametrize(
    ("when", "how"),
    [
        ("rows-00000.npy", signal.SIGKILL),
        ("state.safetensors", signal.SIGINT),
        ("state.safetensors", signal.SIGKILL),
    ],
)
def test_killed_while_collecting_or_training(tmp_path, llama, when, how, reference):
    """The process is ended from outside as soon as a file appears; a resume makes the same head."""
    out = tmp_path / "run"
    process = spawn("--model", llama, "--corpus", "c", "--out", out, *flags(LONGER), "--quiet")
    deadline = time.monotonic() + 60
    while not (out / when).exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    if how == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130, err
        command = re.search(r"go on with: mtplab head train (.*)", err)
        assert command and command[1] == f"--resume --out {out}" and "Traceback" not in err
    assert not (out / "head").exists()
    assert cli.main(["head", "train", "--resume", "--out", str(out), "--quiet", "-o", "json"]) == 0
    assert trainlab.head_bytes(out) == reference


LONGER = {k: v for k, v in trainlab.SMALL.items() if k != "corpora"} | {"rows": 24, "steps": 50}


@pytest.fixture(scope="module")
def reference(llama, tmp_path_factory):
    out = tmp_path_factory.mktemp("longer") / "run"
    trainlab.make(out, llama, **LONGER)
    return trainlab.head_bytes(out)


def test_more_steps_may_follow_and_other_changes_may_not(tmp_path, llama):
    trainlab.make(tmp_path / "run", llama, steps=3)
    before = trainlab.head_bytes(tmp_path / "run")
    assert cli.main(["head", "train", "--resume", "--out", str(tmp_path / "run"), "--steps", "6", "--quiet"]) == 0
    assert trainlab.head_bytes(tmp_path / "run") != before
    assert lines(tmp_path / "run" / "curve.jsonl")[-1]["step"] == 6


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--out", "x"], 2, "--model is missing"),
        (["--out", "x", "--model", "MODEL"], 2, "exactly one of --steps and --minutes"),
        (["--out", "x", "--model", "MODEL", "--steps", "1", "--minutes", "1"], 2, "exactly one of --steps and"),
        (["--out", "x", "--model", "MODEL", "--steps", "0"], 2, "--steps is 0 but must be above 0"),
        (
            ["--out", "x", "--model", "MODEL", "--steps", "1", "--length", "8", "--prompt-tokens", "8"],
            2,
            "leave nothing",
        ),
        (
            ["--out", "x", "--model", "MODEL", "--steps", "1", "--depth", "9"],
            2,
            "--depth 9 is out of range; use 1 to 8",
        ),
        (["--out", "x", "--model", "MODEL", "--steps", "1", "--rows", "0"], 2, "--rows is 0 but must be at least 1"),
        (
            ["--out", "x", "--model", "MODEL", "--steps", "1", "--length", "9999"],
            2,
            "beyond the model's context of 4096",
        ),
        (["--out", "x", "--model", "MODEL", "--steps", "1", "--corpus", "poems"], 2, "'poems' is neither a bundled"),
        (["--out", "x", "--model", "nowhere", "--steps", "1"], 3, "neither a checkpoint folder nor a hub id"),
        (["--out", "x", "--resume"], 2, "x holds no head training"),
        (["--out", "MODEL", "--model", "MODEL", "--steps", "1"], 2, "exists already; choose another --out"),
    ],
)
def test_a_wrong_request_is_one_sentence(tmp_path, llama, monkeypatch, capfd, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    filled = [str(llama) if a == "MODEL" else a for a in arguments]
    filled += [] if "--corpus" in filled or "--resume" in filled else ["--corpus", "c"]
    assert cli.main(["head", "train", *filled, "--quiet"]) == code
    captured = capfd.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert not (tmp_path / "x").exists()


def test_a_corpus_must_be_named(tmp_path, llama, capfd):
    assert cli.main(["head", "train", "--model", str(llama), "--steps", "1", "--out", str(tmp_path / "x")]) == 2
    assert "no --corpus is named; give a text to begin from" in capfd.readouterr().err


def test_a_resume_with_another_plan_trunk_or_damage(tmp_path, llama, capfd):
    out = tmp_path / "run"
    model = tiny.build(tmp_path / "m", "llama")
    trainlab.make(out, model, steps=2)
    resume = ["head", "train", "--resume", "--out", str(out), "--quiet"]
    assert cli.main([*resume, "--lr", "0.5"]) == 2
    assert "begun with another plan (lr: 0.02 -> 0.5)" in capfd.readouterr().err
    (out / "state.safetensors").write_bytes((out / "state.safetensors").read_bytes()[:200])
    assert cli.main(resume) == 2
    assert "state.safetensors is damaged" in capfd.readouterr().err
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    assert cli.main(resume) == 2
    assert "was begun with files" in capfd.readouterr().err


def test_a_loss_that_explodes_says_so(tmp_path, llama, monkeypatch):
    monkeypatch.setattr(loop.chain, "loss", lambda *a, **k: mx.array(float("nan")) * a[0].proj.weight.sum())
    with pytest.raises(ModelError, match=r"not finite at step 0; lower --lr"):
        trainlab.make(tmp_path / "run", llama)


def test_a_full_disk_leaves_no_half_file(tmp_path, llama, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RequestError, match="no space is left"):
        trainlab.make(tmp_path / "run", llama)
    assert not list((tmp_path / "run").glob("*"))


# Any trunk -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3_text"])
def test_other_architectures_get_a_head_too(tmp_path, checkpoints, kind):
    """A hybrid with recurrent state and its MTP head left alone, and one with sliding windows; greedy stays equal."""
    import helpers

    from mtplab.decode.drafters.mtp import MTPDrafter
    from mtplab.decode.selection import Draws
    from mtplab.decode.settings import Settings

    model = checkpoints(kind)
    trainlab.make(tmp_path / "run", model, steps=3)
    loaded = trainlab.loaded_with(model, tmp_path / "run")
    assert loaded.head.spec.family == "mimo" and loaded.facts["head_folder"] == str(tmp_path / "run" / "head")
    settings = Settings(max_tokens=16, ignore_eos=True)
    prompt = tiny.prompt(1, 9)
    drafter = MTPDrafter(loaded.head, settings, Draws(0, 0))
    got = list(helpers.run_speculative(loaded.target, prompt, settings, drafter, 2))
    assert helpers.tokens_of(got) == helpers.tokens_of(helpers.run_baseline(loaded.target, prompt, settings))
    assert sum(r.proposed for r in got[1:]) > 0


def test_a_quantized_trunk_unembeds_what_it_stores(tmp_path, checkpoints):
    import mlx.nn as nn

    target = load_target(checkpoints("llama")).target
    ids = mx.array([5, 2, 90])
    for kind in ({"group_size": 32, "bits": 4}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}):
        head = nn.QuantizedLinear.from_linear(target.outer.lm_head, **kind)
        plain, target.outer.lm_head = target.outer.lm_head, head
        h = mx.random.normal((3, 32), key=mx.array([1, 2], dtype=mx.uint32))
        assert mx.abs(target.unembed(h)[:, ids] - h @ target.unembedding_rows(ids).T).max().item() < 1e-4
        assert target.unembedding_size() == tiny.VOCAB
        target.outer.lm_head = plain


# The learning rate and the first head --------------------------------------------------------------------------------


def test_the_schedule_warms_up_stays_and_falls_to_nothing():
    assert loop.schedule(0, 0.0) == pytest.approx(1 / 40)
    assert loop.schedule(100, 0.5) == 1.0 and loop.schedule(1, 0.05) == 1.0
    assert loop.schedule(100, 0.85) == pytest.approx(0.5)
    assert loop.schedule(100, 1.0) == 0.0


def test_the_first_head_is_the_linear_map_of_the_states(load):
    """On states that are a linear function of what the head sees, the untrained head gives them back."""
    loaded, rng = load("mimo"), np.random.default_rng(1)
    layer, target = loaded.head.layers[0], loaded.target
    tokens = rng.integers(0, tiny.VOCAB, (40, 32))
    size = np.exp(rng.normal(size=32))  # dimensions of very different sizes
    embedded = np.array(layer_norm(target.embed(mx.array(tokens))))
    turn = np.linalg.qr(rng.normal(size=(32, 32)))[0]
    hidden = np.zeros((40, 32, 32))
    hidden[:, 0] = rng.normal(size=(40, 32))
    for t in range(1, 32):
        new = 0.6 * hidden[:, t - 1] @ turn + 0.8 * embedded[:, t]
        hidden[:, t] = new / np.sqrt(np.square(new).mean(-1, keepdims=True))
    rows = np.zeros(40, [("hidden", "<f2", (32, 32)), ("tokens", "<i4", (32,))])
    rows["hidden"], rows["tokens"] = hidden * size, tokens
    loop.begin(layer, target, rows, 1)
    _, out = layer(mx.array(rows["hidden"][:, :-1]).astype(mx.float32), target.embed(mx.array(tokens[:, 1:])), None)
    error = np.array(out) / size - hidden[:, 1:]
    assert np.sqrt(np.square(error).mean()) < 0.15, "their own size is one"


def layer_norm(x: mx.array) -> mx.array:
    return x / mx.sqrt(mx.square(x).mean(axis=-1, keepdims=True))


def test_progress_in_a_log_is_one_line_a_minute(tmp_path):
    import io

    stream, now = io.StringIO(), [0.0]
    progress = Progress(stream, clock=lambda: now[0])
    for now[0] in (0.0, 1.0, 59.0, 61.0):
        progress.step(f"at {now[0]:.0f}")
    assert stream.getvalue() == "at 0\nat 61\n"


def test_a_plan_with_an_unknown_key():
    with pytest.raises(RequestError, match="unknown key 'stpes'"):
        HeadPlan.from_json({"model": "m", "stpes": 3})
