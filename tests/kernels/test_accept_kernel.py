"""Greedy acceptance: the numpy reference says what is right, the plain twin must agree bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from mtplab import backend

backend.setup()

import mlx.core as mx  # noqa: E402
from mtplab.kernels.accept import Verdict, accept, read, reference  # noqa: E402

from mtplab.errors import ModelError  # noqa: E402

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
INF, NAN = float("inf"), float("nan")


def ints(*values: int) -> mx.array:
    return mx.array(values, dtype=mx.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("v", [1, 2, 7, 31, 64, 1000, 4097])
def test_twin_equals_reference(dtype, v):
    rng = np.random.default_rng(v)
    for k in range(9):
        # Few distinct values: ties in nearly every row.
        logits = mx.array(rng.integers(-3, 4, (k + 1, v)).astype(np.float32)).astype(dtype)
        exact = np.array(logits.astype(mx.float32))
        drafts = exact.argmax(-1)[:k]
        for wrong in range(k + 1):
            block = drafts.copy()
            block[wrong:] = rng.integers(0, v, k - wrong)
            got = np.array(accept(logits, mx.array(block.astype(np.int32))))
            assert got.dtype == np.int32
            assert got.tolist() == reference.accept(exact, block).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lowest_id_wherever_they_stand(dtype):
    for v in (2, 8, 17, 33, 256, 4099):
        for low, high in ((0, v - 1), (v // 3, v // 2), (v // 2, v - 1)):
            row = np.full((1, v), -2.0, np.float32)
            row[:, [low, high]] = 3.0
            assert read(accept(mx.array(row).astype(dtype), ints())).token == low


def test_nearby_logits_are_told_apart_as_given_not_after_rounding_to_probabilities():
    # In bf16 these two differ in the last bit; their log-probabilities in bf16 would not.
    row = mx.array([[20.0, 20.125, 20.0]]).astype(mx.bfloat16)
    assert read(accept(row, ints())).token == 1


def test_packed_layout_and_verdict():
    logits = mx.array([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
    assert accept(logits, ints(1, 2)).tolist() == [2, 0, 1, 2, 0]
    assert read(accept(logits, ints(1, 0))) == Verdict(accepted=1, token=2, choices=(1, 2, 0))
    assert read(accept(logits[:1], ints())) == Verdict(accepted=0, token=1, choices=(1,))


def test_a_match_after_a_mismatch_does_not_count():
    logits = mx.array([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
    assert read(accept(logits, ints(0, 2))).accepted == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_are_ordinary_values(dtype):
    rows = mx.array([[-INF] * 4, [-INF, -INF, 5, -INF], [0, INF, 1, INF]]).astype(dtype)
    assert read(accept(rows, ints(0, 2))) == Verdict(2, 1, (0, 2, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 1, 5, 15, 16, 39])
def test_a_nan_is_refused_wherever_it_stands(dtype, place):
    rows = np.zeros((2, 40), np.float32)
    rows[0, 7] = rows[1, 3] = 1
    rows[0, place] = NAN
    packed = accept(mx.array(rows).astype(dtype), ints(7))
    assert packed.tolist() == [0, -1, -1, 3] == reference.accept(rows, [7]).tolist()
    with pytest.raises(ModelError, match="NaN"):
        read(packed)


def test_a_nan_behind_the_first_rejection_does_not_matter():
    rows = mx.array([[0.0, 1], [NAN, 0]])
    assert read(accept(rows, ints(0))) == Verdict(0, 1, (1, -1))


def test_no_draft_matches_a_nan():
    rows = np.array([[NAN, 0], [0, 1]], np.float32)
    assert accept(mx.array(rows), ints(-1)).tolist()[0] == 0 == reference.accept(rows, [-1])[0]


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"\(3,\).*\(3, 5\)"):
        accept(mx.zeros((3, 5)), ints(1, 2, 3))
    with pytest.raises(ValueError, match="K\\+1 rows"):
        accept(mx.zeros((5,)), ints())
