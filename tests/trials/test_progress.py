"""Progress says what runs and when it will be over, and keeps out of the way of pipes and terminals."""

from __future__ import annotations

import io

from mtplab.trials.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


def scripted(stream, *times):
    readings = iter(times)
    return Progress(stream, clock=lambda: next(readings))


def test_the_eta_is_what_is_left_at_the_pace_so_far():
    stream = io.StringIO()
    progress = scripted(stream, 0, 100, 160)
    progress.begin(4)
    progress.trial("000-a-0")
    progress.next()
    progress.trial("001-b-0")
    assert stream.getvalue().splitlines() == ["trial 1/4 000-a-0", "trial 2/4 001-b-0, about 3 min 0 s left"]


def test_a_terminal_gets_one_living_line_that_is_wiped_at_the_end():
    stream = Terminal()
    progress = scripted(stream, 0, 0, 10)
    progress.begin(2)
    progress.trial("000-a-0")
    progress.within({"at": 1, "of": 4})
    progress.close()
    assert "\n" not in stream.getvalue() and "1/4 requests" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_a_closed_stderr_does_not_end_a_measurement():
    stream = io.StringIO()
    progress = Progress(stream)
    stream.close()
    progress.trial("000-a-0")
    progress.note("still here")


def test_quiet_keeps_the_notes():
    stream = io.StringIO()
    progress = Progress(stream, quiet=True)
    progress.begin(1)
    progress.trial("000-a-0")
    progress.note("something")
    assert stream.getvalue() == "note: something\n"


def test_durations():
    assert [duration(s) for s in (3.2, 130, 7300, -1)] == ["3 s", "2 min 10 s", "2 h 1 min", "0 s"]
