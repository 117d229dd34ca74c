"""A trace holds every record, changes nothing, and is readable after an interruption."""

from __future__ import annotations

import errno
import io
import json
import os

import pytest

from mtplab.decode.settings import Settings
from mtplab.errors import RequestError
from mtplab.records.types import Prefill
from mtplab.trials.arms import Session, parse_arm
from mtplab.trials.trace import TraceWriter, read_trace

SETTINGS = Settings(max_tokens=12, ignore_eos=True)
PROMPT = [3, 5, 7, 11]


def records_of(loaded, arm: str = "depth2"):
    return Session(loaded, parse_arm(arm)).run(PROMPT, request=0, settings=SETTINGS)


def counted(records) -> list:
    """Records without their times."""
    return [r.token if isinstance(r, Prefill) else (r.proposed, r.accepted, r.tokens) for r in records]


def test_every_record_comes_back_equal(load, tmp_path):
    with TraceWriter(tmp_path / "t.jsonl") as trace:
        seen = list(trace.watch(records_of(load("mimo")), request="a"))
        seen += list(trace.watch(records_of(load("mimo"), "baseline"), request="b"))
    found = list(read_trace(tmp_path / "t.jsonl"))
    assert [r for _, r in found] == seen
    assert [name for name, r in found if isinstance(r, Prefill)] == ["a", "b"]


def test_tracing_changes_no_token(load, tmp_path):
    with TraceWriter(tmp_path / "t.jsonl") as trace:
        traced = counted(trace.watch(records_of(load("mimo")), request="0"))
    assert traced == counted(records_of(load("mimo")))


def test_what_was_decoded_before_an_interruption_is_in_the_file(load, tmp_path):
    trace = TraceWriter(tmp_path / "t.jsonl")
    watched = trace.watch(records_of(load("mimo")), request="0")
    first = [next(watched), next(watched)]
    watched.close()  # what Ctrl-C does to a generator
    assert [r for _, r in read_trace(trace.path)] == first
    trace.close()


def test_a_line_cut_off_at_the_end_is_left_out(load, tmp_path):
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as trace:
        seen = list(trace.watch(records_of(load("mimo")), request="0"))
    path.write_text(path.read_text()[:-20])
    assert [r for _, r in read_trace(path)] == seen[:-1]


def test_a_trace_is_never_written_over(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("mine")
    with pytest.raises(RequestError, match="exists; name another file"):
        TraceWriter(path)
    assert path.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"no/t\.jsonl cannot be written"):
        TraceWriter(tmp_path / "no" / "t.jsonl")


class FullDisk(io.StringIO):
    """Takes what fits into a buffer and fails where the bytes have to go."""

    def flush(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_sentence(load, tmp_path):
    with TraceWriter(tmp_path / "t.jsonl") as trace:
        real, trace._file = trace._file, FullDisk()
        with pytest.raises(RequestError, match=r"t\.jsonl ends early \(No space left on device\)"):
            list(trace.watch(records_of(load("mimo")), request="0"))
        trace._file = real


def test_a_foreign_schema_is_refused(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"schema": 99, "kind": "verify", "request": "0"}) + "\n")
    with pytest.raises(RequestError, match="line 1: schema 99"):
        list(read_trace(tmp_path / "t.jsonl"))
