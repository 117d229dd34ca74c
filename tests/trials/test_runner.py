"""A run survives whatever happens to its workers and to itself, and never stores an error as a row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trial_lab import FAKE

from mtplab.errors import ModelError, RequestError
from mtplab.trials import runner
from mtplab.trials.plan import Plan
from mtplab.trials.store import open_run


def test_every_trial_is_stored_once_and_whole(lab):
    store = lab.start()
    assert lab.run(store) == 0
    assert len(lab.trials()) == 4 and all(n.endswith(".jsonl") for n in lab.trials())
    assert lab.started()[0] == "prepare" and sorted(lab.started()[1:]) == [
        "baseline-0",
        "baseline-1",
        "depth1-0",
        "depth1-1",
    ]
    stored = list(open_run(lab.folder).completed())
    assert [len(s.requests) for s in stored] == [2, 2, 2, 2]
    assert all(len(r.tokens) == 9 for s in stored for r in s.requests)
    assert store.manifest["schema"] == 1 and store.manifest["blas"]["kind"] == "reference"


def test_a_failed_trial_is_no_row_and_a_resume_runs_only_that_one(lab):
    lab.behave(depth1_0="error:ModelError")
    store = lab.start()
    assert lab.run(store) == 1
    assert [(f["arm"], f["round"], f["reason"]) for f in store.failed] == [("depth1", 0, "depth1 needs an MTP head")]
    assert len(lab.trials()) == 3
    lab.behave()
    lab.log.unlink()
    assert lab.run(open_run(lab.folder)) == 0
    assert lab.started() == ["depth1-0"] and store.failed == []


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("killed", "killed by SIGKILL"),
        ("fault", "ZeroDivisionError"),
        ("short", "not complete"),
        ("hang", "longer than 1 s"),
    ],
)
def test_a_worker_may_die_in_any_way(lab, how, words):
    lab.behave(depth1_1=how)
    store = lab.start(trial_timeout_s=1.0)
    assert lab.run(store) == 1
    assert words in store.failed[0]["reason"]
    assert len(lab.trials()) == 3 and not list(lab.folder.rglob("*.part"))


def test_a_full_disk_ends_the_run_with_one_sentence_and_no_partial_file(lab):
    lab.behave(depth1="full")
    store = lab.start()
    with pytest.raises(RequestError, match=r"no space is left on the device.*--resume") as caught:
        lab.run(store)
    assert caught.value.code == 2
    assert not list(lab.folder.rglob("*.part")) and store.failed == []
    lab.behave()
    assert lab.run(open_run(lab.folder)) == 0 and len(lab.trials()) == 4


@pytest.mark.parametrize(("kind", "error"), [("RequestError", RequestError), ("ModelError", ModelError)])
def test_what_is_wrong_from_the_start_leaves_no_folder(lab, kind, error):
    lab.behave(prepare=f"error:{kind}")
    with pytest.raises(error, match="needs an MTP head"):
        lab.start()
    assert sorted(p.name for p in lab.place.iterdir()) == ["log", "words.txt"]


def test_an_unreadable_corpus_is_found_before_a_worker_starts(lab):
    with pytest.raises(RequestError, match="neither a bundled text"):
        runner.start(lab.folder, Plan(corpora=("/no/such.txt",)), runner.Progress(lab.stderr), command=FAKE)
    assert lab.started() == []


def test_a_disturbed_trial_is_repeated_once_and_kept_aside(lab):
    lab.behave(depth1_0="disturbed")
    store = lab.start()
    assert lab.run(store) == 0
    assert lab.started().count("depth1-0") == 2
    assert sum(n.endswith(".disturbed") for n in lab.trials()) == 1
    assert "disturbed" in lab.stderr.getvalue()


def test_on_a_machine_that_is_always_busy_repeating_stops(lab):
    lab.behave(baseline="disturbed", depth1="disturbed")
    store = lab.start(rounds=3)
    lab.run(store)
    assert len(lab.started()) == 1 + 6 + runner.PATIENCE
    assert lab.stderr.getvalue().count("keep this machine busy") == 1


def test_nothing_is_repeated_where_the_plan_says_so(lab):
    lab.behave(depth1="disturbed")
    lab.run(lab.start(repeat_disturbed=False))
    assert len(lab.started()) == 1 + 4


def test_a_resume_under_another_blas_is_refused(lab):
    lab.behave(depth1_1="fault")
    store = lab.start()
    lab.run(store)
    lab.behave(depth1_1="other-blas")
    with pytest.raises(RequestError, match="was begun with blas"):
        lab.run(open_run(lab.folder))


def run_in_a_process(lab, hold: dict[str, str]) -> subprocess.Popen:
    """The runner in a process of its own, as the command line runs it, until the trial in `hold` hangs."""
    code = (
        "import sys; from pathlib import Path; from mtplab.trials import runner, plan, store, progress\n"
        "from mtplab.errors import MtplabError\n"
        f"s = store.open_run(Path({str(lab.folder)!r}))\n"
        "try: sys.exit(runner.run(s, progress.Progress(), command=sys.argv[1:]))\n"
        "except MtplabError as e: print(e, file=sys.stderr); sys.exit(e.code)\n"
    )
    environment = os.environ | {"FAKE": json.dumps(hold)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *FAKE], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(lab.folder.rglob("*.part")):
        time.sleep(0.02)
    time.sleep(0.2)
    return process


def hold_third(lab) -> tuple[dict[str, str], list[str]]:
    """Rules under which the third trial of the plan hangs, and the names of the first two."""
    from mtplab.trials.plan import order

    trials = order(lab.plan())
    return {f"{trials[2].arm}-{trials[2].round}": "hang"}, [f"{t.name}.jsonl" for t in trials[:2]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_is_complete_and_says_how_to_go_on(lab, number):
    lab.start()
    rules, first = hold_third(lab)
    process = run_in_a_process(lab, rules)
    wait_for(lambda: lab.trials()[:2] == first and any(n.endswith(".part") for n in lab.trials()))
    os.killpg(process.pid, number)  # as a terminal does: the whole group
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"2 of 4 trials are stored; go on with: mtplab sweep --resume --out {lab.folder}" in stderr
    assert "Traceback" not in stderr
    assert lab.trials() == first
    lab.log.unlink()
    assert lab.run(open_run(lab.folder)) == 0
    assert len(lab.started()) == 2 and len(lab.trials()) == 4


def test_a_killed_runner_leaves_a_run_that_resumes_and_no_orphan(lab):
    lab.start()
    rules, first = hold_third(lab)
    process = run_in_a_process(lab, rules)
    wait_for(lambda: lab.trials()[:2] == first and any(n.endswith(".part") for n in lab.trials()))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    lab.log.unlink()
    assert lab.run(open_run(lab.folder)) == 0
    assert len(lab.started()) == 2
    assert len(lab.trials()) == 4 and not any(n.endswith(".part") for n in lab.trials())


def wait_for(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_two_runners_do_not_share_a_folder(lab):
    store = lab.start()
    with (
        store.locked(),
        pytest.raises(RequestError, match="being written by another mtplab"),
        open_run(lab.folder).locked(),
    ):
        pass


def test_the_resume_command_survives_a_shell():
    assert runner.resume_command(Path("a b/it's")) == "mtplab sweep --resume --out 'a b/it'\"'\"'s'"
