from __future__ import annotations

import pytest
from trial_lab import Lab


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Lab:
    return Lab(tmp_path, monkeypatch)
