"""Loading keeps each weight once: the peak stays below 1.15 of the checkpoint's bytes when the dtype is kept."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tiny
from exports import KINDS, convert

from mtplab.models.loader import load_target

WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 2048}
MEASURE = """
import sys; from mtplab import backend; backend.setup()
import mlx.core as mx
from mtplab.models.headers import read_headers
from mtplab.models.loader import load_target
from pathlib import Path
stored = sum(t.nbytes for t in read_headers(Path(sys.argv[1])).values())
load_target(sys.argv[1], dtype="float16")
print(mx.get_peak_memory() / stored, mx.get_active_memory() / stored, stored)
"""


@pytest.mark.parametrize("kind", ["float16", "affine4", "mxfp8"])
def test_peak_while_loading(tmp_path, kind):
    one = load_target(tiny.build(tmp_path / "m", "mimo", **WIDE), dtype="float16")
    folder = convert(one, tmp_path / "x", KINDS.get(kind))
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, check=True, timeout=120
    )
    peak, active, stored = map(float, out.stdout.split())
    assert stored > 3 << 20
    assert peak < 1.15 and active < 1.05, (peak, active)


def test_a_raw_moe_head_peaks_below_two_layers_more(tmp_path, made_moe):
    """Fused experts are split and numbered ones stacked: a copy of one layer at a time, not of the file."""
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, str(made_moe)], capture_output=True, text=True, check=True, timeout=120
    )
    peak, active, _ = map(float, out.stdout.split())
    assert active < 1.05 and peak < 1.6, (peak, active)


@pytest.fixture
def made_moe(tmp_path):
    import published

    m = published.build("qwen3_5_moe", tmp_path / "moe")
    return published.write(m, tmp_path / "half", {n: a.half() for n, a in m.tensors.items()})
