"""The cache as a transaction: any kept count, exceptions, layers that cannot roll back."""

from __future__ import annotations

import helpers
import mlx.core as mx
import pytest
import tiny

from mtplab.errors import ModelError, RequestError
from mtplab.models.cache import Cache, WindowCache, make_room

KINDS = ["llama", "mimo", "qwen3_5", "gemma3_text"]


def fed(target, tokens) -> Cache:
    return helpers.serial_cache(target, tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [3, 15, 16, 17, 40])
@pytest.mark.parametrize("rows", [1, 2, 4, 9])
def test_keep_n_equals_feeding_n(load, kind, before, rows):
    target, text = load(kind).target, tiny.prompt(2, before + rows)
    serial = helpers.SerialStates(target, text)
    for n in range(rows + 1):
        cache = fed(target, text[:before])
        with cache.attempt(rows) as attempt:
            out = target.forward(mx.array(text[before:]), cache)
            mx.eval(out.logits)
            attempt.keep(n)
        serial.check(cache)
    # And it goes on from there as the serial one does.
    a, b = (target.forward(mx.array([7]), c).logits for c in (cache, fed(target, text)))
    assert mx.allclose(a, b, atol=1e-4) if kind == "gemma3_text" else mx.array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_an_exception_inside_leaves_the_state_as_it_was(load, kind, rows):
    target, text = load(kind).target, tiny.prompt(2, 30)
    cache = fed(target, text[:20])
    with pytest.raises(KeyError), cache.attempt(rows):
        mx.eval(target.forward(mx.array(text[20 : 20 + rows]), cache).logits)
        raise KeyError("boom")
    helpers.assert_same_state(cache, fed(target, text[:20]))
    with cache.attempt(rows) as attempt:  # and it is usable again
        mx.eval(target.forward(mx.array(text[20 : 20 + rows]), cache).logits)
        attempt.keep(rows)
    helpers.assert_same_state(cache, fed(target, text[: 20 + rows]))


def test_a_fresh_cache_can_be_attempted_and_abandoned(load):
    for kind in KINDS:
        target = load(kind).target
        cache = target.new_cache()
        with cache.attempt(2):
            mx.eval(target.forward(mx.array([1, 2]), cache).logits)
        assert cache.length == 0
        a = target.forward(mx.array([3]), cache).logits
        b = target.forward(mx.array([3]), target.new_cache()).logits
        assert mx.array_equal(a, b)


def test_misuse_is_an_error(load):
    target = load("llama").target
    cache = target.new_cache()
    with pytest.raises(ValueError, match="at least one row"):
        cache.attempt(0)
    with cache.attempt(2) as attempt:
        with pytest.raises(RuntimeError, match="open attempt"):
            cache.attempt(1)
        target.forward(mx.array([1]), cache)
        with pytest.raises(RuntimeError, match="2 rows but 1"):
            attempt.keep(1)
        target.forward(mx.array([2]), cache)
        with pytest.raises(ValueError, match="3 of 2"):
            attempt.keep(3)


def test_all_layers_are_checked_before_any_is_changed(load):
    """A layer of an unknown kind refuses the attempt; nothing was fed."""
    target = load("llama").target
    cache = target.new_cache()

    class Strange:
        pass

    cache.layers[2] = Strange()
    with pytest.raises(ModelError, match="layer 2 keeps its state in Strange"):
        cache.attempt(2)
    assert cache.length == 0 and all(c.offset == 0 for c in cache.layers[:2])


def test_recurrent_state_without_a_tape_is_refused(load):
    target = load("qwen3_5").target
    cache = Cache(target.new_cache().layers, tape=None)
    with pytest.raises(ModelError, match="cannot be rolled back"):
        cache.attempt(2)


def test_a_recurrent_layer_that_does_not_report_is_refused(load):
    """The rollback hook hides (a wrapper called something else): an error, not wrong tokens."""
    target = load("qwen3_5").target
    cache = target.new_cache()
    with pytest.raises(ModelError, match="layer 0 did not report"), cache.attempt(2) as attempt:
        target.forward(mx.array([1, 2]), cache)
        cache.tape.calls.pop(0)
        attempt.keep(1)
    assert cache.length == 0


@pytest.mark.parametrize("keep", [0, 4])
def test_window_mask_shows_each_row_what_a_single_row_sees(keep):
    """Positions visible to row i of a block = positions a one-row ring holds at that time."""
    size = 12
    for before in (0, 3, 9, 11, 12, 13, 30):
        for rows in (2, 3, 8):
            block, serial = WindowCache(size, keep), WindowCache(size, keep)

            def kv(a, b):
                x = mx.arange(a, b, dtype=mx.float32).reshape(1, 1, -1, 1)
                return x, x

            for t in range(before):
                block.update_and_fetch(*kv(t, t + 1))
                serial.update_and_fetch(*kv(t, t + 1))
            mask = block.make_mask(rows, return_array=True)
            held = block.update_and_fetch(*kv(before, before + rows))[0].reshape(-1).tolist()
            for i in range(rows):
                seen = {int(p) for p, m in zip(held, mask[i].tolist(), strict=True) if m}
                ring = serial.update_and_fetch(*kv(before + i, before + i + 1))[0].reshape(-1).tolist()
                assert seen == {int(p) for p in ring}, (before, rows, i)


def test_options_that_cannot_be_honoured_are_refused(load):
    for kind, options in (
        ("gemma3_text", {"kv_bits": 8}),
        ("qwen3_5", {"kv_bits": 8}),
        ("gemma3_text", {"max_kv_size": 64}),
        ("llama", {"kv_bits": 8, "max_kv_size": 64}),
        ("llama", {"max_kv_size": 4}),
    ):
        with pytest.raises(RequestError, match=r"--(kv-bits|max-kv-size)"):
            load(kind, **options)


def _plain(kv_bits: int | None):
    from mlx_lm.models.cache import KVCache, QuantizedKVCache

    leaf = KVCache() if kv_bits is None else QuantizedKVCache(group_size=32, bits=kv_bits)

    def feed(n: int, seed: int) -> None:
        rows = mx.random.normal((2, 1, 2, n, 32), key=mx.random.key(seed))
        leaf.update_and_fetch(rows[0], rows[1])

    return leaf, feed


@pytest.mark.parametrize("kv_bits", [None, 4])
@pytest.mark.parametrize("before", [200, 255, 256, 300])
@pytest.mark.parametrize("rows", [1, 4, 300])
def test_room_made_before_a_pass_is_the_room_mlx_lm_would_make_in_it(kv_bits, before, rows):
    (ours, feed), (theirs, feed_theirs) = _plain(kv_bits), _plain(kv_bits)
    for f in (feed, feed_theirs):
        f(before, 1)
    make_room(ours, rows)
    for f in (feed, feed_theirs):
        f(rows, 2)
    for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        for x, y in zip(a if kv_bits else [a], b if kv_bits else [b], strict=True):
            assert x.shape == y.shape
            assert mx.array_equal(x[..., : before + rows, :], y[..., : before + rows, :])


def test_a_growing_cache_holds_one_layer_twice_and_not_all_of_them():
    leaves = []
    for _ in range(16):
        leaf, feed = _plain(None)
        feed(256, 1)
        mx.eval(leaf.keys, leaf.values)
        leaves.append(leaf)
    cache = Cache(leaves)
    cache.length = 256
    layer = cache.nbytes // 16
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with cache.attempt(1) as attempt:
        cache.length += 1
        attempt.keep(1)
    assert cache.nbytes == 16 * 2 * layer
    assert mx.get_peak_memory() - before < 16 * layer + 4 * layer  # the new rows, and one layer's old and new ones
