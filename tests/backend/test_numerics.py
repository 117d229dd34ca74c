"""Simulated numerics: other bits for blocks, the same for single rows, named honestly, gone afterwards."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from mtplab.backend import numerics
from mtplab.backend.instances import overridden, override
from mtplab.errors import RequestError


def logits(target, widths, ids=(5, 6, 7, 8)):
    """Logits of the same tokens in blocks of the given widths."""
    cache, out, at = target.new_cache(), [], 0
    for w in widths:
        out.append(target.forward(mx.array(ids[at : at + w]), cache).logits)
        at += w
    return mx.concatenate(out)


@pytest.mark.parametrize("kind", ["llama", "mimo", "qwen3_5"])
@pytest.mark.parametrize(
    "spec, least, most",
    [
        ("splitk@*", 0, 1e-3),
        ("bf16acc:8@layers.1.*", 1e-3, 1),
        ("lowp@lm_head", 1e-3, 1),
        ("noise:1e-6@lm_head", 0, 1e-4),
        ("noise:1e-2@lm_head", 1e-3, 1),
    ],
)
def test_blocks_change_and_single_rows_do_not(load, kind, spec, least, most):
    target = load(kind).target
    clean = logits(target, [1, 1, 1, 1])
    with numerics.simulate(target, spec) as simulation:
        assert mx.array_equal(logits(target, [1, 1, 1, 1]), clean)
        block = logits(target, [4])
        assert least < mx.abs(block - clean).max().item() < most
        assert mx.array_equal(logits(target, [4]), block), "the cause is known, so it repeats"
        assert numerics.in_force(target) == [simulation.name] and simulation.name.startswith("simulated: ")
    assert mx.array_equal(logits(target, [4]), clean) and numerics.in_force(target) == []


def test_noise_has_the_size_asked_for_and_is_the_row_s_own():
    linear = nn.Linear(16, 4096, bias=False)
    x = mx.random.normal((1, 3, 16), key=mx.random.key(1))
    clean = linear(x)
    with numerics.simulate(nn.Sequential(linear), "noise:1e-3@*"):
        noisy, turned = linear(x), linear(x[:, ::-1])
    relative = (noisy - clean) / mx.sqrt(mx.mean(clean * clean, axis=-1, keepdims=True))
    assert 0.99e-3 < mx.abs(relative).max().item() <= 1.01e-3
    assert abs(relative.mean().item()) < 5e-5 and relative.std().item() == pytest.approx(1e-3 / 3**0.5, rel=0.05)
    assert mx.array_equal(turned[:, ::-1], noisy), "where a row stands in the block decides nothing"


def test_jitter_is_never_the_same_twice(load):
    target = load("llama").target
    with numerics.simulate(target, "jitter:1e-4@layers.0.*"):
        assert not mx.array_equal(logits(target, [1, 1]), logits(target, [1, 1]))
    assert mx.array_equal(logits(target, [1, 1]), logits(target, [1, 1]))


def test_split_k_is_the_same_product_in_two_parts():
    linear = nn.Linear(64, 8)
    x = mx.random.normal((1, 5, 64), key=mx.random.key(2))
    with numerics.simulate(nn.Sequential(linear), "splitk:4@*"):
        got = linear(x)
    parts = [x[..., i : i + 16] @ linear.weight[:, i : i + 16].T for i in range(0, 64, 16)]
    assert mx.array_equal(got, ((parts[0] + parts[1]) + parts[2]) + parts[3] + linear.bias)


@pytest.mark.parametrize("mode, bits, group", [("affine", 4, 32), ("mxfp4", 4, 32), ("mxfp8", 8, 32)])
def test_quantized_linears_are_reached_too(mode, bits, group):
    linear = nn.QuantizedLinear.from_linear(nn.Linear(64, 32, bias=False), group, bits, mode=mode)
    x = mx.random.normal((1, 2, 64), key=mx.random.key(3))
    clean = linear(x)
    with numerics.simulate(nn.Sequential(linear), "bf16acc:16@*"):
        near = linear(x)
    assert not mx.array_equal(near, clean) and mx.allclose(near, clean, rtol=0.05, atol=0.05)


def test_several_parts_reach_what_their_patterns_say(load):
    target = load("mimo").target
    with numerics.simulate(target, "splitk@layers.1.mlp.*, noise:1e-5@lm_head") as simulation:
        assert simulation.modules == (
            "model.layers.1.mlp.down_proj",
            "model.layers.1.mlp.gate_proj",
            "model.layers.1.mlp.up_proj",
            "model.embed_tokens",
        )
        assert len(simulation.parts) == len(numerics.in_force(target)) == 2


def test_everything_is_taken_away_after_an_exception(load):
    target = load("llama").target
    classes = [type(m) for _, m in target.model.named_modules()]
    with pytest.raises(ZeroDivisionError), numerics.simulate(target, "lowp@*"):
        raise ZeroDivisionError
    assert [type(m) for _, m in target.model.named_modules()] == classes


@pytest.mark.parametrize(
    "spec, words",
    [
        ("", "are empty"),
        ("splitk", "not KIND"),
        ("fastmath@*", "one of splitk"),
        ("noise:2@*", "up to 1"),
        ("noise:nan@*", "above 0"),
        ("splitk:1@*", "whole number from 2"),
        ("splitk:x@*", "whole number from 2"),
        ("lowp:3@*", "takes no value"),
        ("splitk@layers.9.*", "no linear fits 'layers.9.*'"),
    ],
)
def test_a_wrong_spec_is_refused_before_anything_changes(load, spec, words):
    target = load("llama").target
    classes = [type(m) for _, m in target.model.named_modules()]
    with pytest.raises(RequestError, match=words.replace("*", r"\*")), numerics.simulate(target, spec):
        pass
    assert [type(m) for _, m in target.model.named_modules()] == classes


def test_overrides_go_in_any_order_and_leave_the_class_as_it_was():
    linear = nn.Linear(2, 2)
    x = mx.ones((1, 2))
    clean = linear(x)
    first = override(linear, lambda inner, x: inner(x) + 1)
    second = override(linear, lambda inner, x: inner(x) * 2)
    assert mx.array_equal(linear(x), (clean + 1) * 2) and isinstance(linear, nn.Linear)
    first()
    first()
    assert mx.array_equal(linear(x), clean * 2) and len(overridden(linear)) == 1
    second()
    assert type(linear) is nn.Linear and mx.array_equal(linear(x), clean)
