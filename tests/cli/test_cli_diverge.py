"""`mtplab diverge`: the verdict on stdout, progress on stderr, one sentence for each bad request."""

from __future__ import annotations

import json

import pytest

from mtplab.cli import main
from mtplab.trials.diverging import arm_names, candidate

SHORT = ["--prompt-tokens", "16", "--prompts", "2", "--max-tokens", "24"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("".join(chr(33 + (7 * i * i + i) % 90) for i in range(400)))
    return str(path)


def test_the_last_line_is_one_document(checkpoints, text, capsys, tmp_path):
    folder = tmp_path / "made"
    model = str(checkpoints("mimo"))
    assert main(["diverge", "--model", model, "--corpus", text, *SHORT, "-o", "json", "--out", str(folder)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert found["verdict"] == "equal" and found["first_divergence"] is None and found["gap"] is None
    assert [a["arm"] for a in found["arms"]] == ["depth0", "depth1", "depth2", "depth3", "adaptive", "scripted3"]
    assert found["compared"] == 6 * 2 * 24 and found["state"]["clean"] and found["state"]["head_audited"] > 0
    assert found["settings"]["corpora"] == [text] and found["settings"]["prompt_tokens"] == 16
    assert found["settings"]["history"] == "verified" and found["settings"]["prime"] is True
    assert found["settings"]["max_tokens"] == 24 and found["settings"]["blas"]["kind"] == "reference"
    assert (folder / "page.html").exists() and "page:" in err


def test_simulated_numerics_are_named_and_explained(checkpoints, text, capsys):
    flags = ["--arm", "scripted3", "--simulate", "noise:2e-2@layers.1.mlp.down_proj", "-q", "-o", "json"]
    assert main(["diverge", "--model", str(checkpoints("llama")), "--corpus", text, *SHORT, "-m", "60", *flags]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["verdict"] == "numeric" and found["first_module"] == "model.layers.1.mlp.down_proj"
    assert found["explained_by"] == ["layers.1.mlp.down_proj"], found["explained"]
    assert "simulated" in found["simulated"] and err == ""


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--arm", "depth9"], "depth 9 is out of range"),
        (["--arm", "baseline"], "leave it out"),
        (["--arm", "scripted0"], "that is depth0"),
        (["--arm", "fast"], "scripted1..8"),
        (["--arm", "depth0,depth0"], "given twice"),
        (["-p", "!"], "has 1 token; diverge needs two or more"),
        (["-p", "abcdef", "--prompts", "2"], "--prompts 2 is for prompts cut from a corpus; drop it, or --prompt"),
        (["-p", "abcdef", "--prompt-tokens", "96"], "--prompt-tokens 96 is for prompts cut from a corpus"),
        (["-p", "abc", "--corpus", "novel"], "use one of them"),
        (["-p", "abcdef", "--simulate", "magic@*"], "'magic@*'"),
        (["-p", "abcdef", "--simulate", "splitk@nothing"], "no linear fits 'nothing'"),
        (["-p", "abcdef", "-o", "xml"], "'xml'"),
        (["-p", "abcdef", "--kv-group-size", "32"], "--kv-bits"),
        (["-p", "abcdef", "-m", "9999"], "context is 4096"),
    ],
)
def test_a_bad_request_is_one_sentence(checkpoints, capsys, flags, sentence):
    assert main(["diverge", "--model", str(checkpoints("llama")), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and sentence in err and err.count("\n") == 1


def test_an_arm_that_needs_a_head_is_refused_without_one(checkpoints, capsys):
    assert main(["diverge", "--model", str(checkpoints("llama")), "-p", "abcdef", "--arm", "depth1"]) == 3
    assert "no MTP head" in capsys.readouterr().err


def test_a_model_without_a_head_gets_the_arms_it_can_run(checkpoints, capsys):
    assert main(["diverge", "--model", str(checkpoints("llama")), "-p", "abcdef", "-m", "12", "-q"]) == 0
    out = capsys.readouterr().out
    assert "ngram3" in out and "scripted3" in out and "depth1" not in out
    assert out.startswith("equal: no arm left the baseline")


def test_settings_that_nothing_uses_are_recorded_as_none(checkpoints, capsys):
    flags = ["-p", "abcdef", "-m", "8", "--arm", "depth0", "-q", "-o", "json"]
    assert main(["diverge", "--model", str(checkpoints("mimo")), *flags]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert [settings[k] for k in ("corpora", "prompt_tokens", "history", "prime")] == [None] * 4


def test_arm_lists():
    assert arm_names(["depth0, depth2", "scripted3"]) == ("depth0", "depth2", "scripted3")
    assert candidate("scripted2").depth == 2 and candidate("ngram4").drafter == "ngram"
