"""Differences in bits, ulp and value; what is seen of a model, and that nothing of the watching stays."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mtplab.diagnose import watch


def test_ulp_counts_the_numbers_in_between():
    one = np.float32(1)
    up, down = np.nextafter(one, np.float32(2)), np.nextafter(one, np.float32(0))
    further = np.array([one, up, np.nextafter(down, np.float32(0))])
    d = watch.difference(mx.ones((3,)), mx.array(further))
    assert (d.equal, d.elements, d.differ, d.ulp_max) == (False, 3, 2, 2)
    assert d.abs_max == pytest.approx(float(up - one))


def test_ulp_crosses_zero_and_the_two_zeros_are_neighbours_of_the_same_numbers():
    least = np.array([np.finfo(np.float32).smallest_subnormal])
    assert watch.difference(mx.array(least), mx.array(-least)).ulp_max == 2
    zeros = watch.difference(mx.array([0.0]), mx.array([-0.0]))
    assert not zeros.equal and zeros.differ == 1 and zeros.ulp_max == 0


@pytest.mark.parametrize("dtype, step", [(mx.bfloat16, 2.0**-7), (mx.float16, 2.0**-10)])
def test_ulp_is_of_the_dtype(dtype, step):
    d = watch.difference(mx.array([1.0], dtype), mx.array([1.0 + 3 * step], dtype))
    assert d.ulp_max == 3 and d.abs_max == pytest.approx(3 * step)


def test_equal_nans_are_equal_bits_and_integers_compare_as_they_are():
    assert watch.difference(mx.array([float("nan")]), mx.array([float("nan")])).equal
    d = watch.difference(mx.array([1, 2, 3]), mx.array([1, 5, 3]))
    assert not d.equal and d.differ == 1
    assert d.relative == 1
    turned = watch.difference(mx.array([[1, 2, 3]]), mx.array([[3, 2, 1]]))
    assert not turned.equal and turned.relative == 0, "the same ids, chosen in another order"
    with pytest.raises(ValueError, match="cannot be compared"):
        watch.difference(mx.zeros((2,)), mx.zeros((3,)))


def test_kinds_by_path(load):
    target = load("qwen3_5").target
    kinds = watch.kinds(target.model, target.new_cache().layers)
    trunk = "language_model.model."
    assert kinds[trunk + "embed_tokens"] == "embedding" and kinds["language_model.lm_head"] == "unembedding"
    assert kinds[trunk + "layers.0.linear_attn"] == "recurrent mixer"
    assert kinds[trunk + "layers.3.self_attn"] == "attention"
    assert kinds[trunk + "layers.3.self_attn.q_proj"] == "linear" and kinds[trunk + "norm"] == "norm"
    assert kinds[trunk + "layers.0"] == "block"


def test_watching_sees_every_module_in_order_and_stays_nowhere(load):
    target = load("mimo").target
    classes = [type(m) for _, m in target.model.named_modules()]
    seen = []
    with watch.watching(target.model, seen.append):
        logits = target.forward(mx.array([1, 2]), target.new_cache()).logits
    paths = [s.path for s in seen]
    assert paths[0] == "model.embed_tokens" and paths.index("model.layers.0") < paths.index("model.layers.1")
    assert seen[-1].kind == "unembedding" and mx.array_equal(seen[-1].output[0], logits)
    with pytest.raises(ZeroDivisionError), watch.watching(target.model, lambda s: 1 / 0):
        target.forward(mx.array([1]), target.new_cache())
    assert [type(m) for _, m in target.model.named_modules()] == classes


def test_an_output_that_the_model_writes_into_is_seen_as_it_was(load):
    target = load("gemma3_text").target  # scales its embeddings in place
    seen = {}
    with watch.watching(target.model, lambda s: seen.setdefault((s.path, s.kind), s.output)):
        target.forward(mx.array([3]), target.new_cache())
    assert mx.array_equal(seen["model.embed_tokens", "embedding"][0], target.embed(mx.array([3])))
