"""A run folder is whole at any moment, and a file that is not says so."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from mtplab.errors import RequestError
from mtplab.trials import files, store
from mtplab.trials.plan import Plan


def create(folder: Path, plan: Plan | None = None) -> store.Store:
    return store.create(folder, plan or Plan(), prompts=[], manifest={"machine": {}}, costs={})


def test_an_existing_folder_is_never_written_into(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(RequestError, match=r"exists already; choose another --out$"):
        create(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    create(tmp_path / "begun")
    with pytest.raises(RequestError, match=r"choose another --out, or continue that run with --resume$"):
        create(tmp_path / "begun")
    (tmp_path / "begun" / "plan.json").write_text("[]")
    with pytest.raises(RequestError, match=r"plan\.json is damaged"):
        store.open_run(tmp_path / "begun")


def test_an_existing_file_or_dangling_link_counts_as_existing(tmp_path):
    (tmp_path / "f").write_text("mine")
    (tmp_path / "l").symlink_to(tmp_path / "nowhere")
    for name in ("f", "l"):
        with pytest.raises(RequestError, match="exists already"):
            store.check_free(tmp_path / name)
    assert (tmp_path / "f").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"cannot write .*file/run: .*file is not a folder; choose another --out"):
        store.check_free(tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_one_sentence(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RequestError, match="Permission denied; choose another --out"):
        store.check_free(tmp_path / "run")


def test_a_read_only_place_is_one_sentence(mounted):
    place = mounted("size=16k,ro")
    with pytest.raises(RequestError, match="Read-only file system; choose another --out"):
        store.check_free(place / "a" / "run")


def test_the_check_leaves_nothing_behind(tmp_path):
    store.check_free(tmp_path / "a" / "b" / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_write_leaves_no_half_made_run(tmp_path, monkeypatch):
    written = []

    def full(path, value):
        written.append(path.name)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        files.write_json(path, value)

    monkeypatch.setattr(store, "write_json", full)
    with pytest.raises(RequestError, match="no space is left on the device while writing"):
        create(tmp_path / "run")
    assert list(tmp_path.iterdir()) == [] and len(written) == 2


@pytest.fixture
def mounted(tmp_path):
    """`mounted(options)` -> a small file system of its own; skips where mounting is not allowed."""
    place = tmp_path / "small"

    def mount(options: str) -> Path:
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        try:
            subprocess.run(command, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            place.rmdir()
            pytest.skip("needs the right to mount a tmpfs")
        return place

    yield mount
    if place.exists():
        subprocess.run(["umount", str(place)], check=False)


def test_a_disk_that_is_really_full(mounted):
    place = mounted("size=16k")
    goal = place / "goal.json"
    files.write_json(goal, {"old": True})
    with pytest.raises(RequestError, match="no space is left on the device") as caught:
        files.write_json(goal, {"new": "x" * 100_000})
    assert caught.value.code == 2
    assert json.loads(goal.read_text()) == {"old": True}, "the old file must survive"
    assert [p.name for p in place.iterdir()] == ["goal.json"], "no temporary may be left"


def test_json_never_holds_nan():
    text = files.dumps({"a": float("nan"), "b": [float("inf"), 1.5], 3: (1, None)})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "3": [1, None]}


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(RequestError, match=r"holds no run \(no plan.json in it\)"):
        store.open_run(tmp_path)


def test_a_resume_with_another_plan_names_what_differs(tmp_path):
    create(tmp_path / "run", Plan(rounds=2))
    with pytest.raises(RequestError, match=r"begun with another plan \(rounds: 2 -> 3\)"):
        store.open_run(tmp_path / "run", Plan(rounds=3))
    assert store.open_run(tmp_path / "run", Plan(rounds=2, trial_timeout_s=9.0)).plan.rounds == 2


def test_a_foreign_schema_is_refused(tmp_path):
    folder = create(tmp_path / "run").folder
    (folder / "plan.json").write_text(json.dumps({"schema": 99, "plan": {}}))
    with pytest.raises(RequestError, match="has schema 99; this mtplab reads schema 1"):
        store.open_run(folder)


def test_damage_is_named_with_file_and_line(lab):
    run = lab.start()
    lab.run(run)
    path = next((lab.folder / "trials").iterdir())
    first, rest = path.read_text().split("\n", 1)
    path.write_text(first[:-20] + "\n" + rest)
    with pytest.raises(RequestError, match=rf"{path.name} is damaged at line 1; delete it and resume"):
        list(store.open_run(lab.folder).completed())
    path.write_text(first + "\n")
    with pytest.raises(RequestError, match="is not complete; delete it and resume"):
        list(store.open_run(lab.folder).completed())
    path.unlink()
    lab.run(store.open_run(lab.folder))
    assert len(list(store.open_run(lab.folder).completed())) == 4
