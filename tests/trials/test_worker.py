"""The real worker on a tiny model: what it writes, what it leaves out, how it ends."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtplab import cli
from mtplab.errors import ModelError
from mtplab.records.types import Request
from mtplab.trials import worker
from mtplab.trials.plan import Plan

ROOT = Path(cli.__file__).resolve().parents[2]
PROMPTS = [
    {"id": f"{c}/{i}", "corpus": c, "text": "", "tokens": [3 + i, 7, 11, 5, 7, 11]}
    for c in ("a", "b")
    for i in range(2)
]
COSTS = {"verify_ms": dict.fromkeys(range(1, 5), 1.0), "draft_ms": dict.fromkeys(range(1, 4), 0.1), "host_ms": 0.0}


def spec(folder: Path, checkpoint: Path, arm: str = "depth2", number: int = 0, **changes) -> Path:
    plan = Plan(model=str(checkpoint), max_tokens=12, **changes)
    data = {"job": "trial", "plan": plan.to_json(), "arm": arm, "round": number, "prompts": PROMPTS, "costs": COSTS}
    path = folder / "spec.json"
    path.write_text(json.dumps(data | {"out": str(folder / "t.part")}))
    return path


def start(path: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "mtplab.trials.worker", str(path)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def run(path: Path) -> tuple[list[Request], dict, list[dict]]:
    """(requests, last words, events)"""
    process = start(path)
    events = [json.loads(x) for x in process.stdout]
    assert process.wait() == 0, process.stderr.read()
    *lines, last = [json.loads(x) for x in (path.parent / "t.part").read_text().splitlines()]
    assert all(len(x["pieces"]) == len(Request.from_json(x["request"]).tokens) for x in lines)
    return [Request.from_json(x["request"]) for x in lines], last["done"], events


def test_a_trial_is_every_prompt_in_every_mode_and_no_warm_up(tmp_path, checkpoints):
    requests, done, events = run(spec(tmp_path, checkpoints("mimo"), number=3))
    seen = [(r.settings["mode"], r.id) for r in requests]
    assert sorted(seen) == sorted((m, p["id"]) for m in ("greedy", "sampled") for p in PROMPTS)
    assert done["requests"] == 8 and events[-1] == {"at": 8, "of": 8}
    assert all(r.settings["arm"] == "depth2" and r.settings["round"] == 3 for r in requests)
    assert {(r.settings["mode"], r.settings["temp"], r.settings["seed"]) for r in requests} == {
        ("greedy", 0.0, 0),
        ("sampled", 0.8, 3),
    }
    assert all(len(r.tokens) == 12 for r in requests)
    assert done["blas"]["kind"] == "reference" and done["peak_memory_bytes"] > 0 and "disturbed" in done["load"]


def test_sampled_rounds_differ_and_greedy_rounds_repeat(tmp_path, checkpoints):
    def tokens(number: int) -> dict[str, list]:
        requests, _, _ = run(spec(tmp_path, checkpoints("mimo"), number=number))
        return {m: [r.tokens for r in requests if r.settings["mode"] == m] for m in ("greedy", "sampled")}

    one, two = tokens(0), tokens(1)
    assert one["greedy"] == two["greedy"] and one["sampled"] != two["sampled"]
    assert tokens(0) == one


def test_no_text_tunes_the_policy_of_another(tmp_path, checkpoints):
    requests, _, _ = run(spec(tmp_path, checkpoints("mimo"), arm="adaptive", modes=("greedy",)))
    starts = {r.id: r.settings["policy"] for r in requests}
    of_the_text = {i: {k: v for k, v in p.items() if k != "costs"} for i, p in starts.items()}
    assert of_the_text["a/0"] == of_the_text["b/0"] != of_the_text["a/1"]
    # What passes cost is the machine's: learned from the warm-up on, and known to the next text.
    looks = {i: sum(p["costs"]["looks"].values()) for i, p in starts.items()}
    assert 0 < looks["a/0"] < looks["b/0"]


def test_a_wrong_model_is_an_event_with_its_exit_code(tmp_path):
    (tmp_path / "empty").mkdir()
    process = start(spec(tmp_path, tmp_path / "empty"))
    # Its stdin stays open until it is done.
    event, err = json.loads(process.stdout.readlines()[-1]), process.stderr.read()
    assert process.wait() == 3 == event["code"] and event["kind"] == "ModelError"
    assert "no config.json" in event["failed"] and "Traceback" not in err


def test_a_worker_ends_when_its_parent_is_gone(tmp_path, checkpoints):
    path = spec(tmp_path, checkpoints("mimo"))
    data = json.loads(path.read_text())
    data["plan"]["max_tokens"] = 3000
    path.write_text(json.dumps(data))
    process = start(path)
    while not (tmp_path / "t.part").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.stdin.close()
    assert process.wait(timeout=10) == 130


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ModelError("bad file"), "ModelError", 3),
        (OSError(errno.ENOSPC, "No space left on device"), "ENOSPC", 2),
        (PermissionError(errno.EACCES, "Permission denied"), "PermissionError", 4),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError", 4),
    ],
)
def test_every_failure_has_a_reason_a_kind_and_a_code(error, kind, code):
    event = worker.failure(error, "/out")
    assert (event["kind"], event["code"]) == (kind, code) and event["failed"]
