"""Loading keeps each weight once: the peak stays below 1.15 of the checkpoint's bytes when the dtype is kept."""

from __future__ import annotations

import gc

import mlx.core as mx
import published
import pytest
import tiny
from exports import KINDS, convert

from mtplab.models.headers import read_headers
from mtplab.models.loader import load_target

WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 2048}


def peak_and_kept(folder) -> tuple[float, float]:
    """Peak and remaining memory of a load, as shares of the bytes in the files."""
    stored = sum(t.nbytes for t in read_headers(folder).values())
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = load_target(folder, dtype="float16")
    shares = (mx.get_peak_memory() - before) / stored, (mx.get_active_memory() - before) / stored
    del loaded
    return shares


@pytest.mark.parametrize("kind", ["float16", "affine4", "mxfp8"])
def test_peak_while_loading(tmp_path, kind):
    one = load_target(tiny.build(tmp_path / "m", "mimo", **WIDE), dtype="float16")
    folder = convert(one, tmp_path / "x", KINDS.get(kind))
    del one
    assert sum(t.nbytes for t in read_headers(folder).values()) > 3 << 20
    peak, kept = peak_and_kept(folder)
    assert 0.9 < kept < 1.05 and peak < 1.15, (peak, kept)


def test_experts_are_stacked_and_split_one_at_a_time(tmp_path):
    """Of a raw MoE checkpoint in small files a copy of a layer's experts exists beside the rest, not of the file."""
    m = published.build("qwen3_5_moe", tmp_path / "moe")
    folder = published.write(m, tmp_path / "half", {n: a.half() for n, a in m.tensors.items()})
    peak, kept = peak_and_kept(folder)
    assert 0.9 < kept < 1.05 and peak < 1.3, (peak, kept)
