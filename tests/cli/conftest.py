"""The command line without a new process, for every test of a verb."""

from __future__ import annotations

import pytest

from mtplab import cli


@pytest.fixture
def call(capfd, monkeypatch):
    """`call(*arguments)` -> (exit code, stdout, stderr)."""
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(*arguments):
        code = cli.main([str(a) for a in arguments])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run
