"""How far rounding moves every module, measured; numpy's own perturbation of one linear is the oracle."""

from __future__ import annotations

import block_faults
import latent  # noqa: F401  (its tiny models)
import mlx.core as mx
import pytest
import tiny

from mtplab.diagnose.locate import filled
from mtplab.diagnose.sensitivity import reach, rounding, ties
from mtplab.diagnose.state import contents, leaves
from mtplab.models.target import Target

TEXT = tiny.prompt(3, 12)


def moves(target: Target, size: float) -> dict[str, tuple[float, float]]:
    found = reach(target, [4, 5, 6], filled(target, TEXT), size)
    return {path: m for (path, _), m in found.items()}


def test_every_linear_of_the_first_layer_moves_by_what_was_put_in(load):
    """The embedding's noise and its own, each of that size, in a random direction."""
    found = moves(load("llama").target, 1e-3)
    for name in ("q_proj", "k_proj", "v_proj"):
        out, given = found[f"model.layers.0.self_attn.{name}"]
        assert 0.8e-3 < given < 1.8e-3  # of 32 columns, the largest of 3 rows and 8 draws
        assert 1.0e-3 < out < 4e-3


def test_moves_are_as_large_as_the_noise_and_add_up(load):
    target = load("llama").target
    small, large = moves(target, 1e-5), moves(target, 1e-3)
    assert small.keys() == large.keys()
    ratios = [large[p][0] / small[p][0] for p in small if small[p][0]]
    assert len(ratios) > 20 and min(ratios) > 50 and max(ratios) < 200
    assert large["model.layers.2"][0] > large["model.layers.0.self_attn.q_proj"][1]


def test_sums_that_cancel_move_by_much_of_themselves(load):
    """A linear all of whose rows are orthogonal to what it is given, but for a thousandth."""
    target = load("llama").target
    linear, seen = target.model.layers[0].mlp.down_proj, []
    inner = type(linear)
    linear.__class__ = type("Seen", (inner,), {"__call__": lambda self, x: seen.append(x) or inner.__call__(self, x)})
    before = moves(target, 1e-4)["model.layers.0.mlp.down_proj"][0]
    linear.__class__ = inner
    x, weight = seen[-1].reshape(-1), linear.weight
    cache = filled(target, TEXT)
    linear.weight = weight - 0.999 * (weight @ x)[:, None] * x[None] / (x * x).sum()
    try:
        found = {p: m for (p, _), m in reach(target, [6], cache, 1e-4).items()}
    finally:
        linear.weight = weight
    assert found["model.layers.0.mlp.down_proj"][0] > 3 * before


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_5"])
def test_state_and_model_are_left_as_they_were(load, kind):
    target = load(kind).target
    cache = filled(target, TEXT)
    classes = [type(m) for _, m in target.model.named_modules()]
    copies = [{n: mx.array(a) for n, a in contents(leaf, len(TEXT)).items()} for _, leaf in leaves(cache)]
    reach(target, [4, 5, 6], cache, 1e-2)
    assert cache.length == len(TEXT) and [type(m) for _, m in target.model.named_modules()] == classes
    for (_, leaf), copy in zip(leaves(cache), copies, strict=True):
        assert all(mx.array_equal(a, copy[n]) for n, a in contents(leaf, len(TEXT)).items())


def test_only_a_choice_that_is_nearly_tied_is_one_that_noise_makes_otherwise(load):
    loaded = load("qwen3_moe", {"num_experts_per_tok": 3})
    router = loaded.target.model.layers[0].mlp.gate
    ways = {}
    for name, apart in (("clear", None), ("tied", block_faults.TIES)):
        weight = router.weight
        router.weight = weight if apart is None else block_faults.twins(weight, apart)
        ways[name] = ties(loaded.target, [4, 5, 6], filled(loaded.target, TEXT), 1e-6)
        router.weight = weight
    assert {p for p, _ in ways["tied"] - ways["clear"]} >= {"model.layers.0.mlp.switch_mlp"} and not ways["clear"]


def test_the_size_of_rounding_is_that_of_most_products_and_at_least_the_dtypes():
    assert rounding([3e-3, 2e-3, 3e-3, 0.4], mx.float32) == 3e-3 and rounding([0.4, 3e-3], mx.float32) == 3e-3
    assert rounding([1e-6] * 3 + [1e-3] * 2, mx.float32) == 1e-3
    assert rounding([], mx.float32) == rounding([1e-12], mx.float32) == pytest.approx(2.0**-25)
    assert rounding([], mx.bfloat16) == pytest.approx(2.0**-9)
