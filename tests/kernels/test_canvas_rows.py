"""The rows of a canvas: the numpy reference says what is right; the plain twin, cut along V, must agree."""

from __future__ import annotations

import numpy as np
import pytest

from mtplab import backend

backend.setup()

import mlx.core as mx  # noqa: E402
from mtplab.kernels.canvas_rows import Rows, canvas_rows, plain, reference  # noqa: E402

from mtplab.backend.keys import uniforms  # noqa: E402

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
INF, NAN = float("inf"), float("nan")
W = plain.WIDTH


def check(rows: Rows, wanted: tuple, within: float = 2e-5) -> None:
    """Ids exactly; reals relatively, NaN where the reference has NaN."""
    for name, got, want in zip(Rows._fields[:5], rows[:5], wanted, strict=True):
        got = np.array(got)
        assert got.shape == want.shape
        if name in ("choice", "proposal"):
            assert got.dtype == np.int32
            assert got.tolist() == want.tolist(), name
        else:
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, want, rtol=within, atol=within, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("v", [1, 2, 97, W - 1, W, W + 1, 2 * W + 3])
def test_twin_equals_reference(dtype, v):
    rng = np.random.default_rng(v)
    for c, std, temperature in ((1, 3.0, 1.0), (5, 3.0, 0.4), (3, 30.0, 0.8)):
        logits = mx.array(rng.normal(0, std, (c, v)).astype(np.float32)).astype(dtype)
        exact, drawn = np.array(logits.astype(mx.float32)), rng.exponential(size=(c, v)).astype(np.float32)
        check(canvas_rows(logits, temperature), reference.canvas_rows(exact, temperature))
        check(canvas_rows(logits, temperature, noise=mx.array(drawn)), reference.canvas_rows(exact, temperature, drawn))


@pytest.mark.parametrize("v", [7, W, 2 * W + 3])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_the_expected_row_of_a_table(v, temperature):
    rng = np.random.default_rng(v)
    logits, table = rng.normal(0, 5, (3, v)).astype(np.float32), rng.normal(size=(v, 6)).astype(np.float32)
    rows = canvas_rows(
        mx.array(logits), temperature, expect=lambda w, first: w @ mx.array(table[first : first + w.shape[1]])
    )
    wanted = reference.expected(logits, temperature, table)
    np.testing.assert_allclose(np.array(rows.expected), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("v", [50, W + 9])
def test_the_entropy_of_known_distributions(v):
    """Uniform: log V, at any temperature. One id with half of the mass: worked out by hand."""
    rows = canvas_rows(mx.full((2, v), 7.0), 0.4)
    np.testing.assert_allclose(np.array(rows.entropy), np.log(v), rtol=1e-6)
    assert rows.choice.tolist() == [0, 0]
    half = np.zeros((1, v), np.float32)
    half[0, v - 1] = np.log(v - 1)
    rows = canvas_rows(mx.array(half), 1.0)
    assert rows.entropy.item() == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 * (v - 1)), rel=2e-6)
    assert rows.choice.item() == v - 1
    assert rows.log_prob(mx.array(half), 1.0, mx.array([v - 1])).item() == pytest.approx(np.log(0.5), rel=2e-6)


def test_a_sure_row_has_an_entropy_that_is_small_and_not_below_zero():
    """The stop rule compares means with 0.005: cancellation must not make a sure canvas look unsure, or negative."""
    logits = np.full((1, 3 * W), -30.0, np.float32)
    logits[0, 2 * W + 5] = 30.0
    entropy = canvas_rows(mx.array(logits), 0.8).entropy.item()
    assert 0 <= entropy < 1e-6


def test_ties_go_to_the_lowest_id_across_pieces():
    row = np.full((1, 3 * W), -2.0, np.float32)
    row[0, [W + 1, 2 * W + 1]] = 3.0
    drawn = np.ones_like(row)
    rows = canvas_rows(mx.array(row), 1.0, noise=mx.array(drawn))
    assert rows.choice.item() == rows.proposal.item() == W + 1


def test_the_choice_is_of_the_raw_logits():
    """Dividing by the temperature in float32 can make a tie of two neighbours; the argmax must not see it."""
    near = np.array([[20.0, np.nextafter(np.float32(20), np.float32(21))]], np.float32)
    assert near[0, 0] / np.float32(9) == near[0, 1] / np.float32(9)
    assert canvas_rows(mx.array(near), 9.0).choice.item() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("v", [1, 2, 63, 64, 65, W - 1, W, W + 1, 2 * W + 3])
def test_a_number_falls_where_the_running_totals_say(dtype, v):
    """The reference's id; or, where the number lies within rounding of the border of two ids, the other one."""
    rng, many = np.random.default_rng(v), 400
    for std, temperature in ((0.0, 1.0), (3.0, 0.4), (30.0, 0.8)):
        logits = mx.array(rng.normal(0, std, (1, v)).astype(np.float32)).astype(dtype)
        drawn = np.concatenate([[0, 1 - 2.0**-24], uniforms(many - 2, v)]).astype(np.float32)
        found = np.array(canvas_rows(mx.repeat(logits, many, axis=0), temperature, mx.array(drawn)).proposal)
        exact = np.repeat(np.array(logits.astype(mx.float32)), many, axis=0)
        wanted = reference.canvas_rows(exact, temperature, uniform=drawn)[4]
        p = np.exp((exact[0] - exact[0].max()).astype(np.float64) / temperature)
        border = np.cumsum(p / p.sum())
        for u, got, want in zip(drawn, found, wanted, strict=True):
            low, high = sorted((got, want))
            assert got == want or np.abs(border[low:high] - u).max() < 1e-5
        assert (found == wanted).mean() > 0.97 and p[found].min() > 0


@pytest.mark.parametrize("rest", [-0.35, -2.1, None])
def test_a_large_vocabulary_is_met_to_its_end(rest):
    """Running totals of thousands of sums, one after the other, would be off by several ids and miss the last ones."""
    v, drawn = 262_144, np.array([2.0**-24, 0.3, 0.7, 0.99, 0.99999, 1 - 2.0**-24], np.float32)
    row = np.random.default_rng(4).normal(0, 1, v).astype(np.float32) if rest is None else np.full(v, rest, np.float32)
    row[0] = 0.0
    found = canvas_rows(mx.array(np.repeat(row[None], len(drawn), axis=0)), 1.0, mx.array(drawn)).proposal.tolist()
    p = np.exp(row.astype(np.float64))
    border = np.cumsum(p / p.sum())
    for u, got in zip(drawn.astype(np.float64), found, strict=True):
        assert border[got] > u - 3e-7 and (got == 0 or border[got - 1] <= u + 3e-7)
    assert v - found[-1] <= 2 and found[0] == 0


@pytest.mark.parametrize("v", [300, W + 300])
def test_proposals_follow_the_distribution_and_forbidden_ids_are_never_met(v):
    logits = np.full((1, v), -INF, np.float32)
    ids, p = [0, 7, v - 2, v - 1], np.array([0.1, 0.2, 0.3, 0.4])
    logits[0, ids] = 0.5 * np.log(p)
    drawn = mx.array(np.concatenate([[0, 1 - 2.0**-24], uniforms(998, 5)]).astype(np.float32))
    found = np.array(canvas_rows(mx.array(np.repeat(logits, 1000, axis=0)), 0.5, drawn).proposal)
    counts = np.array([(found == i).sum() for i in ids])
    assert counts.sum() == 1000 and found[:2].tolist() == [0, v - 1]
    chi = ((counts - 1000 * p) ** 2 / (1000 * p)).sum()
    assert chi < 16.3  # the 99.9 % point with 3 degrees of freedom; the numbers are fixed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 5, W - 1, W, 2 * W - 1])
def test_a_nan_is_marked_wherever_it_stands_and_only_in_its_row(dtype, place):
    values = np.zeros((2, 2 * W), np.float32)
    values[:, 7] = 1
    values[0, place] = NAN
    drawn = np.ones_like(values)
    for given in ({"noise": drawn}, {"uniform": np.zeros(2, np.float32)}):
        rows = canvas_rows(mx.array(values).astype(dtype), 0.5, **{k: mx.array(a) for k, a in given.items()})
        check(rows, reference.canvas_rows(values, 0.5, **given))
        assert rows.choice.tolist() == [-1, 7] and rows.proposal.tolist() == [-1, 7 if "noise" in given else 0]


def test_infinities():
    """-inf is an ordinary value (a forbidden id); +inf, or nothing but -inf, leaves no distribution."""
    values = np.array([[-INF, 0, 1, -INF], [0, INF, 1, 2], [-INF] * 4], np.float32)
    noise, uniform = np.full_like(values, 0.5), np.full(3, 0.5, np.float32)
    for given in ({}, {"noise": noise}, {"uniform": uniform}):
        rows = canvas_rows(mx.array(values), 0.5, **{k: mx.array(a) for k, a in given.items()})
        check(rows, reference.canvas_rows(values, 0.5, **given))
        assert rows.choice.tolist() == [2, 1, 0]
        assert rows.proposal.tolist() == [2, -1, -1]


def test_the_logits_are_the_only_array_of_their_size():
    """At a vocabulary of 151,936 the peak over the logits themselves stays below 0.3 of them."""
    c, v = 32, 151_936
    logits, table = mx.random.normal((c, v), key=mx.random.key(0)) * 3, mx.ones((v, 8))
    mx.eval(logits, table)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    rows = canvas_rows(
        logits, 0.7, mx.array(uniforms(c, 1)), expect=lambda w, first: w @ table[first : first + w.shape[1]]
    )
    mx.eval(rows)
    assert mx.get_peak_memory() - before + logits.nbytes <= 1.3 * logits.nbytes


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"\[C, V\], not \(5,\)"):
        canvas_rows(mx.zeros((5,)), 1.0)
    for bad in (0, -1.0, INF, NAN):
        with pytest.raises(ValueError, match=f"not {bad}"):
            canvas_rows(mx.zeros((2, 5)), bad)
    with pytest.raises(ValueError, match=r"\(2, 5\), not \(2, 4\)"):
        canvas_rows(mx.zeros((2, 5)), 1.0, noise=mx.ones((2, 4)))
    with pytest.raises(ValueError, match=r"\(2,\), not \(5,\)"):
        canvas_rows(mx.zeros((2, 5)), 1.0, mx.zeros((5,)))
    with pytest.raises(ValueError, match="not both"):
        canvas_rows(mx.zeros((2, 5)), 1.0, mx.zeros((2,)), noise=mx.ones((2, 5)))
