"""The command line as a person meets it: sentences, exit codes, and a result that can be piped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtplab import cli
from mtplab.cli.generate import wants_colour

ROOT = Path(cli.__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "mtplab.cli")


def spawn(*arguments, **options) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "prompt": f"abc{i}(x)" * 4}) + "\n" for i in range(3)))
    return path


SMALL = ("--rounds", 1, "--prompts", 2, "--max-tokens", 12, "--modes", "greedy", "--arms", "baseline,depth2")


# Start-up -------------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from mtplab.cli import main; main(['--help']); main(['sweep', '--help'])\n"
        "heavy = {'mlx', 'numpy', 'scipy', 'torch', 'transformers', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_help_starts_in_a_blink():
    def seconds() -> float:
        """Of processor time: what else runs on the machine is not counted."""
        began = os.times()
        subprocess.run([*COMMAND, "--help"], capture_output=True, check=True, cwd=ROOT)
        ended = os.times()
        return ended.children_user + ended.children_system - began.children_user - began.children_system

    assert min(seconds() for _ in range(8)) < 0.3


def test_every_verb_is_listed_and_explained(call):
    code, out, _ = call("--help")
    assert code == 0
    for verb in ("demo", "generate", "sweep", "diverge", "probe", "denoise", "inspect", "doctor", "convert", "head"):
        assert verb in out
        assert call(verb, "--help")[0] == 0


def test_no_arguments_show_the_help_and_are_an_error(call):
    code, out, err = call()
    assert code == 2 and out == "" and "Usage" in err


# Wrong requests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("swep",), "No such command 'swep'"),
        (("sweep", "--round", 3), "No such option: --round"),
        (("sweep", "--rounds", "many"), "--rounds"),
        (("sweep", "--rounds", 0), "rounds is 0 but must be at least 1"),
        (("sweep", "-o", "yaml"), "output format 'yaml' is not one of table, md, csv, json, jsonl"),
        (("sweep", "--dialect", "klingon"), "unknown dialect 'klingon'"),
        (("sweep", "--arms", "depth1"), "lack 'baseline'"),
        (("sweep", "--resume"), "--resume needs --out"),
        (("sweep", "--plan", "/no/such.toml"), "cannot be read"),
        (("generate", "-p", ""), "the prompt is empty"),
        (("generate", "-p", "x", "--file", "y"), "use one of them"),
        (("generate", "-p", "x", "--arm", "depth1", "--depth", 2), "give one of them"),
        (("generate", "-p", "x", "--depth", 9), "depth 9 is out of range; use 0 to 8"),
        (("generate", "-p", "x", "--arm", "turbo"), "unknown arm 'turbo'; there is baseline"),
        (("generate", "-p", "x", "--max-tokens", 0), "--max-tokens 0 is out of range"),
        (("generate", "-p", "x", "--temp", "nan"), "--temp nan is out of range"),
        (("generate", "-p", "x", "--color", "pink"), "--color 'pink' is not one of"),
        (("generate", "-p", "x", "--color", "never"), "--color never says how --show draws"),
        (("generate", "-p", "x", "--seed", -1), "--seed -1 is out of range; use 0 or more"),
        (("generate", "-p", "x", "--kv-group-size", 32), "give --kv-bits, too"),
        (("sweep", "--modes", "greedy", "--temp", 0.5), "temp is for the sampled mode"),
        (("generate", "-p", "x", "-o", "csv"), "output format 'csv' is not one of table, json, jsonl"),
        (("generate", "--file", "/no/such.txt"), "file '/no/such.txt' does not exist; name a text file"),
        (("generate", "--file", "/"), "file '/' is a folder; name a text file in it"),
        (("generate", "-p", "x", "--history", "zzz"), "history 'zzz' is not one of verified, drafted, none"),
        (("generate", "-p", "x", "--arm", "ngram2", "--history", "zzz"), "history 'zzz' is not one of"),
        (("generate", "-p", "x", "--drafts", "zzz"), "drafts 'zzz' is not one of sampled, point"),
        (("generate", "-p", "x", "--head-norms", "zzz"), "head-norms 'zzz' is not one of raw, shifted"),
        (("generate", "-p", "x", "--arm", "ngram2", "--no-prime"), "prime False is for an MTP head"),
        (("generate", "-p", "x", "--depth", 0, "--history", "none"), "history 'none' is for an MTP head"),
        (("generate", "-p", "x", "--depth", 0, "--head-norms", "raw"), "head-norms 'raw' was given but nothing"),
        (("generate", "-p", "x", "--arm", "ngram2", "--assistant", "/a"), "the assistant in /a was given but nothing"),
        (("generate", "-p", "x", "--depth", 1, "--drafts", "point"), "drafts 'point' is for a temperature above 0"),
        (("generate", "-p", "x", "--depth", 1, "--assistant", "/a", "--history", "none"), "an assistant keeps no rows"),
        (("generate", "-p", "x", "--depth", 1, "--assistant", "/a", "--hidden", "pre"), "the assistant drafts instead"),
        (("sweep", "--history", "zzz"), "history 'zzz' is not one of"),
        (("sweep", "--arms", "baseline", "--drafts", "zzz"), "drafts 'zzz' is not one of"),
        (("sweep", "--arms", "baseline,ngram2", "--history", "none"), "history 'none' is for an MTP head"),
        (("sweep", "--arms", "baseline,depth0", "--drafts", "sampled"), "drafts 'sampled' is for an MTP head"),
        (("sweep", "--modes", "greedy", "--drafts", "point"), "drafts 'point' is for a temperature above 0"),
        (("sweep", "-q", "--arms", "baseline,depth0", "--head-norms", "raw"), "head-norms 'raw' was given but nothing"),
        (("sweep", "-q", "--arms", "baseline", "--assistant", "/a"), "the assistant in /a was given but nothing"),
        (("diverge", "--arm", "ngram2", "--history", "zzz"), "history 'zzz' is not one of"),
        (("diverge", "--arm", "depth0,scripted2", "--history", "drafted"), "history 'drafted' is for an MTP head"),
        (("diverge", "--arm", "depth0", "--head-norms", "raw"), "head-norms 'raw' was given but nothing"),
        (("diverge", "--arm", "depth0", "--head-norms", "zzz"), "head-norms 'zzz' is not one of"),
        (("doctor", "-o", "xml"), "output format 'xml'"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_exit_code_2(call, arguments, words):
    code, out, err = call(*arguments)
    assert code == 2 and out == ""
    assert words in err and err.startswith("mtplab: ") and err.count("\n") == 1


@pytest.mark.parametrize("option", [("--history", "verified"), ("--head-norms", "raw"), ("--no-prime",)])
def test_a_head_option_is_refused_where_the_model_has_no_head(call, checkpoints, option):
    for verb in (("generate", "-p", "abcdef"), ("diverge", "-p", "abcdef", "-q")):
        code, out, err = call(*verb, "--model", checkpoints("llama"), "-m", 4, *option)
        assert code == 2 and out == "" and "MTP head" in err and err.count("\n") == 1


def test_an_unknown_key_in_a_plan_is_named(call, tmp_path):
    (tmp_path / "p.toml").write_text("runds = 3\n")
    code, _, err = call("sweep", "--plan", tmp_path / "p.toml")
    assert code == 2 and "unknown key 'runds'; did you mean 'rounds'?" in err


def test_debug_shows_where(tmp_path):
    with pytest.raises(Exception, match="not one of"):
        cli.main(["sweep", "-o", "yaml", "--debug"])


def test_a_model_that_is_none_is_exit_code_3(call, tmp_path, texts):
    (tmp_path / "empty").mkdir()
    for arguments in (("generate", "-p", "x", "--model"), ("sweep", "--corpus", texts, "--model"), ("inspect",)):
        code, out, err = call(*arguments, tmp_path / "empty")
        assert code == 3 and out == "" and "no config.json" in err, arguments
    assert call("inspect", "no/where/at/all")[0] == 3


def test_nothing_is_left_behind_by_a_wrong_request(call, tmp_path, texts, checkpoints):
    before = sorted(tmp_path.iterdir())
    model, out = checkpoints("llama"), tmp_path / "run"
    code, _, err = call("sweep", "--model", model, "--corpus", texts, "--arms", "baseline,depth1", "--out", out)
    assert code in (2, 3) and "MTP head" in err
    code, _, err = call("sweep", "--model", model, "--corpus", texts, "--arms", "baseline,depth9", "--out", out)
    assert code == 2 and "depth 9 is out of range" in err
    code, _, err = call("sweep", "--model", model, "--corpus", texts, "--max-tokens", 5000, "--arms", "baseline",
                        "--out", out)  # fmt: skip
    assert code == 2 and "tokens and 5000 are to follow" in err
    assert sorted(tmp_path.iterdir()) == before


# Work -----------------------------------------------------------------------------------------------------------


def test_a_sweep_ends_with_one_document_and_a_page(call, tmp_path, texts, checkpoints):
    folder = tmp_path / "run"
    model = checkpoints("mimo")
    code, out, err = call("sweep", "--model", model, "--corpus", texts, *SMALL, "--out", folder, "-o", "json")
    assert code == 0, err
    document = json.loads(out.splitlines()[-1])
    assert [r["arm"] for r in document["rows"]] == ["baseline", "depth2"]
    assert all(r["equal_prompts"] == 2 and r["equal_through"] == 12 for r in document["rows"])
    assert document["machine"]["blas"]["kind"] == "reference" and document["run"] == "run"
    assert (folder / "page.html").is_file() and "trial 1/2" in err and str(folder / "page.html") in err
    code, _, err = call("sweep", "--out", folder, "--corpus", texts, "--model", model)
    assert code == 2 and "exists already" in err
    code, again, _ = call("sweep", "--resume", "--out", folder, "-o", "json", "--quiet")
    assert code == 0 and json.loads(again) == document, "a finished run prints the same without running anything"


def test_generate_streams_the_same_text_as_its_document(call, checkpoints):
    model = checkpoints("mimo")
    flags = ("generate", "--model", model, "-p", "abcabc", "--depth", 3, "-m", 20)
    code, text, err = call(*flags)
    assert code == 0 and "20 tokens" in err and "tokens_per_verify" in err and "depth3" in err
    document = json.loads(call(*flags, "-o", "json")[1])
    assert document["text"] + "\n" == text and len(document["tokens"]) == 20
    assert document["settings"]["temp"] == 0 and document["statistics"]["finish"] == "cap"
    records = [json.loads(x) for x in call(*flags, "-o", "jsonl")[1].splitlines()]
    assert "".join(r["text"] for r in records) == document["text"]
    assert call("generate", "--model", model, "-p", "abcabc", "--arm", "baseline", "-m", 20)[1] == text
    asked = ("--history", "drafted", "--no-prime")
    settings = json.loads(call(*flags, *asked, "-o", "json")[1])["settings"]
    assert settings["history"] == "drafted" and settings["prime"] is False and settings["drafts"] is None
    assert json.loads(call(*flags, "--temp", 1, "-o", "json")[1])["settings"]["drafts"] == "sampled"


def test_colours_only_where_they_are_wanted(call, checkpoints, monkeypatch):
    flags = ("generate", "--model", checkpoints("mimo"), "-p", "abcabc", "--depth", 2, "-m", 8, "--show")
    assert "\x1b[" not in call(*flags)[1]
    assert "\x1b[33m" in call(*flags, "--color", "always")[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert wants_colour("auto") and not wants_colour("never")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour("auto") and wants_colour("always")


def test_a_stop_string_ends_the_text_before_it(call, checkpoints):
    flags = ("generate", "--model", checkpoints("mimo"), "-p", "abcabc", "--depth", 2, "-m", 20)
    text = call(*flags)[1].rstrip("\n")
    stop = text[8:10]
    code, cut, err = call(*flags, "--stop", stop)
    assert code == 0 and cut == text[: text.index(stop)] + "\n" and "stop string" in err


def test_the_prompt_may_come_from_a_file_or_stdin(call, checkpoints, tmp_path, monkeypatch):
    flags = ("generate", "--model", checkpoints("mimo"), "--depth", 0, "-m", 6)
    (tmp_path / "p.txt").write_text("abc")
    wanted = call(*flags, "-p", "abc")[1]
    assert call(*flags, "--file", tmp_path / "p.txt")[1] == wanted
    with open(tmp_path / "p.txt") as file:
        monkeypatch.setattr("sys.stdin", file)
        assert call(*flags, "-p", "-")[1] == wanted


def test_one_token_is_a_prompt_and_more_than_the_context_is_none(call, checkpoints):
    model = checkpoints("mimo")
    assert call("generate", "--model", model, "-p", "a", "--depth", 1, "-m", 5)[0] == 0
    code, out, err = call("generate", "--model", model, "-p", "a" * 5000, "-m", 5)
    assert code == 2 and out == "" and "5000 tokens" in err and "4096" in err


def test_inspect_and_doctor_answer_people_and_programs(call, checkpoints):
    folder = checkpoints("mimo")
    assert "mimo" in call("inspect", folder)[1]
    assert json.loads(call("inspect", folder, "--json")[1])["model_type"] == "mimo"
    document = json.loads(call("doctor", "-o", "json")[1])
    assert {"name", "status", "value", "advice"} <= document["checks"][0].keys()
    assert "blas" in call("doctor", "-o", "md")[1].lower()


# Pipes ----------------------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_early_gets_no_traceback():
    process = spawn("doctor")
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == cli.PIPE_CLOSED and err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_result_that_cannot_be_written_is_one_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "doctor"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 2 and "no space is left" in done.stderr and "Traceback" not in done.stderr


def test_an_interrupted_text_keeps_its_statistics(checkpoints):
    process = spawn("generate", "--model", checkpoints("mimo"), "-p", "abc", "--depth", 1, "-m", 4000, "--ignore-eos")
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "tok/s" in err and "interrupt" in err and "Traceback" not in err


def test_a_model_without_a_head_is_swept(call, checkpoints, texts, tmp_path):
    flags = (
        "--corpus",
        texts,
        *SMALL[:-2],
        "--arms",
        "baseline,depth0,ngram2",
        "--out",
        tmp_path / "run",
        "-o",
        "json",
    )
    code, out, err = call("sweep", "--model", checkpoints("llama"), *flags)
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert [r["arm"] for r in found["rows"]] == ["baseline", "depth0", "ngram2"] and found["failed"] == []


def test_two_drafters_at_once_are_refused(call, checkpoints):
    flags = ("--head", "/h", "--assistant", "/a")
    code, _, err = call("generate", "--model", checkpoints("mimo"), "-p", "abc", "--arm", "depth1", *flags)
    assert code == 2 and "give one of them" in err


def test_an_interrupted_sweep_says_how_to_go_on(checkpoints, texts, tmp_path):
    folder = tmp_path / "run"
    flags = ("--model", checkpoints("mimo"), "--corpus", texts, *SMALL, "--rounds", 9, "--out", folder)
    process = spawn("sweep", *flags, start_new_session=True)
    while not list(folder.glob("trials/*.jsonl")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "" and "Traceback" not in err
    assert f"of 18 trials are stored; go on with: mtplab sweep --resume --out {folder}" in err
    assert not list(folder.rglob("*.part")) and list(folder.glob("trials/*.jsonl"))
