"""The tests run on the reference BLAS: there every row is bit-identical whatever the width, so that every arm must
equal the baseline token for token and any difference is a bug of ours."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

os.environ["MTPLAB_BLAS"] = "reference"
sys.path.insert(0, str(Path(__file__).parent))

import pytest

from mtplab import backend

backend.setup()
# A shell without job control starts what runs in the background with SIGINT ignored, and children inherit that: the
# tests that interrupt one want it as it is in a terminal.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """`checkpoints(kind, **changes)` -> folder of a tiny checkpoint, built once per set of arguments."""
    import tiny

    root, made = tmp_path_factory.mktemp("checkpoints"), {}

    def get(kind: str, **options):
        name = "-".join([kind, *(f"{k}={v}" for k, v in sorted(options.items()))])
        if name not in made:
            made[name] = tiny.build(root / name, kind, **options)
        return made[name]

    return get


@pytest.fixture(scope="session")
def load(checkpoints):
    """`load(kind, options_of_load_target..., build={...})` -> Loaded."""
    from mtplab.models.loader import load_target

    def get(kind: str, build: dict | None = None, **options):
        return load_target(checkpoints(kind, **(build or {})), **options)

    return get
