from __future__ import annotations

import numpy as np
import pytest

from mtplab import backend
from mtplab.backend import keys


def test_scripted_clock_plays_its_steps_and_then_refuses():
    clock = backend.ScriptedClock([5, 0, 10], start=100)
    assert [clock.now_ns() for _ in range(3)] == [105, 105, 115]
    with pytest.raises(RuntimeError, match="3 steps"):
        clock.now_ns()


def test_scripted_clock_with_one_step_ticks_for_ever_and_never_goes_back():
    clock = backend.ScriptedClock(7)
    assert [clock.now_ns() for _ in range(4)] == [7, 14, 21, 28]
    with pytest.raises(ValueError, match="never goes back"):
        backend.ScriptedClock([-1]).now_ns()


def test_monotonic_clock_moves_forward():
    clock = backend.MonotonicClock()
    readings = [clock.now_ns() for _ in range(1000)]
    assert readings == sorted(readings) and readings[-1] > readings[0]


def test_keys_name_their_purpose_whole():
    names = [(1, 23), (12, 3), (1, "23"), (1, 2, 3), (123,), (1, 23, ""), ("1", 23), (-1, 23)]
    assert len({keys.words(0, *name) for name in names} | {keys.words(7, *name) for name in names}) == 16


def test_keys_do_not_change_between_versions():
    # A stored run replays only if these stay: change them and every recorded sample is another one.
    assert keys.words(0) == (866391308, 3918698668)
    assert keys.words(7, "request", 3, "residual") == (563675585, 4138401714)


def test_key_parts_of_other_types_are_refused():
    for bad in (True, 1.0, None, b"x"):
        with pytest.raises(TypeError, match="key part"):
            keys.words(0, bad)


def test_uniform_is_even_and_below_one():
    values = [backend.uniform(3, i, "accept") for i in range(4000)]
    assert min(values) >= 0 and max(values) < 1
    assert abs(sum(values) / len(values) - 0.5) < 0.02
    assert all(v * 2**24 == int(v * 2**24) for v in values)


def test_key_draws_the_same_whatever_else_was_drawn():
    backend.setup()
    import mlx.core as mx

    first = mx.random.uniform(shape=(4,), key=backend.key(1, 2, "canvas")).tolist()
    mx.random.seed(99)
    mx.random.uniform(shape=(1000,))
    state = [s.tolist() for s in mx.random.state]
    again = mx.random.uniform(shape=(4,), key=backend.key(1, 2, "canvas")).tolist()
    other = mx.random.uniform(shape=(4,), key=backend.key(1, 3, "canvas")).tolist()
    assert first == again != other
    assert [s.tolist() for s in mx.random.state] == state


def test_integers_are_even_within_their_range_and_belong_to_their_name():
    drawn = keys.integers(7, 70_000, 3, "start", 1)
    counts = np.bincount(drawn, minlength=7)
    assert counts.size == 7
    assert np.abs(counts - 10_000).max() < 5 * (10_000 * 6 / 7) ** 0.5  # five standard deviations
    assert (keys.integers(7, 10, 3, "start", 1) == drawn[:10]).all()
    assert (keys.integers(7, 70_000, 3, "start", 2) != drawn).mean() > 0.8
    many = keys.uniforms(70_000, 3, "propose")
    assert many.dtype == np.float32 and 0 < many.min() < 1e-4 and 0.9999 < many.max() < 1
    assert abs(many.mean() - 0.5) < 0.005 and (keys.uniforms(10, 3, "propose") == many[:10]).all()
    assert keys.integers(262_144, 20_000, 0, "x").max() > 262_000
