"""The first module that differs is the one the cause was put into."""

from __future__ import annotations

import block_faults
import mlx.core as mx
import pytest
import tiny
from latent import mla

from mtplab.backend import numerics
from mtplab.diagnose.locate import filled, locate
from mtplab.errors import RequestError
from mtplab.models.loader import load_target


@pytest.fixture
def tiny_llama_of_32(tmp_path):
    """Heads of 32 columns, as a quantized cache wants them."""
    path = tmp_path / "m"
    tiny.build(path, "llama", head_dim=32)
    return lambda bits: load_target(path, kv_bits=bits, kv_group_size=32).target


LENGTHS = {"llama": 9, "mimo": 9, "qwen3_5": 9, "gemma3_text": 6}


@pytest.mark.parametrize("kind", list(LENGTHS))
def test_nothing_differs_on_the_reference_blas(load, kind):
    found = locate(load(kind).target, tiny.prompt(3, LENGTHS[kind]), [4, 5, 6])
    assert found.first_module is None and found.logits.equal and found.width == 3
    assert all(m.equal and m.elements and not m.rows for m in found.modules)
    assert len(found.by_layer()) == len(load(kind).target.model.layers)


@pytest.mark.parametrize(
    "kind, spec, first",
    [
        ("llama", "noise:1e-6@layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj"),
        ("llama", "splitk@layers.2.self_attn.v_proj", "model.layers.2.self_attn.v_proj"),
        ("mimo", "bf16acc:8@layers.*.self_attn.*", "model.layers.0.self_attn.q_proj"),
        ("mimo", "noise:1e-7@lm_head", "model.embed_tokens"),
        ("qwen3_5", "lowp@layers.3.self_attn.o_proj", "language_model.model.layers.3.self_attn.o_proj"),
        ("qwen3_5", "noise:1e-5@layers.1.linear_attn.out_proj", "language_model.model.layers.1.linear_attn.out_proj"),
        ("gemma3_text", "noise:1e-3@layers.2.mlp.up_proj", "model.layers.2.mlp.up_proj"),
    ],
)
def test_the_module_that_the_cause_is_in_is_named(load, kind, spec, first):
    target = load(kind).target
    with numerics.simulate(target, spec):
        found = locate(target, tiny.prompt(3, LENGTHS[kind]), [4, 5, 6])
    assert found.first_module == first
    named = next(m for m in found.modules if not m.equal)
    assert named.made and named.ulp_max > 0 and named.rows == (0, 1, 2) and 0 < named.differ <= named.elements
    assert not found.logits.equal


def test_growth_by_layer_and_kind(load):
    target = load("llama").target
    with numerics.simulate(target, "noise:1e-4@layers.1.mlp.down_proj"):
        found = locate(target, tiny.prompt(3, 9), [4, 5, 6, 7])
    growth = found.by_layer()
    assert [layer["ulp_max"] > 0 for layer in growth] == [False, True, True]
    kinds = found.by_kind()
    assert kinds["embedding"]["differ"] == 0 and kinds["linear"]["first"] == "model.layers.1.mlp.down_proj"
    assert kinds["attention"] == {"modules": 3, "differ": 1, "first": "model.layers.2.self_attn"} | {
        "ulp_max": kinds["attention"]["ulp_max"]
    }
    assert found.to_json()["first_module"] == found.first_module


def test_a_window_that_has_wrapped_is_the_attention_s_own(load):
    """Ring order against concatenation order: no linear is at fault, the attention between them is."""
    found = locate(load("gemma3_text").target, tiny.prompt(3, 40), [4, 5, 6], prompt=30)
    assert found.first_module == "model.layers.0.self_attn"


def test_one_row_tells_the_order_of_a_window_that_a_block_has_left(load):
    """The same rows in another order: one row after a block sums otherwise, and no block is there to take apart."""
    target, text = load("gemma3_text").target, tiny.prompt(3, 40)
    ring, chain = filled(target, text[:37], 30), filled(target, text[:36], 30)
    with chain.attempt(3) as attempt:  # a block of the same tokens, one of which is kept
        mx.eval(target.forward(mx.array([text[36], 1, 2]), chain).logits)
        attempt.keep(1)
    found = locate(target, [], [text[37]], cache=ring, chain=chain)
    assert found.width == 1 and found.first_module == "model.layers.0.self_attn"
    assert locate(target, [], [text[37]], cache=ring, chain=ring).first_module is None
    assert ring.length == chain.length == 37


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_mla_is_the_attention_of_layer_0(dtype):
    target = mla() if dtype == mx.float32 else mla(first_k_dense_replace=3)  # the CPU's experts are float32 only
    target.model.set_dtype(dtype)
    found = locate(target, tiny.prompt(3, 9), [4, 5, 6])
    assert found.first_module == "model.layers.0.self_attn" and found.by_kind()["norm"]["first"] is not None


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_rows_of_a_quantized_cache_are_compared_as_it_holds_them(tiny_llama_of_32, bits):
    """Under coarse arithmetic they are steps apart, which is not held against the cache; rows of their own are."""
    target = tiny_llama_of_32(bits)
    with numerics.simulate(target, "lowp@*"):
        found = {m.path: m for m in locate(target, tiny.prompt(3, 9), [4, 5, 6, 7]).modules}
        with block_faults.cached_rolled(None):
            wrong = {m.path: m for m in locate(target, tiny.prompt(3, 9), [4, 5, 6, 7]).modules}
    names = [n for n in found if n.startswith("model.layers.0.") and "mlp" not in n]
    assert names.index("model.layers.0.cache.keys") + 2 == names.index("model.layers.0.self_attn.o_proj")
    for n in ("keys", "values"):
        sound, rolled = (m[f"model.layers.0.cache.{n}"] for m in (found, wrong))
        assert sound.beyond == 0.0 and sound.elements == 4 * 2 * 32
        assert 1e-3 < sound.given < 1e-2 and sound.relative > 0
        assert rolled.relative > 1 and (rolled.beyond > 0.3) == (bits > 2)  # of 4 levels, no two are more than 3 apart


def test_only_quantized_caches_are_watched(load):
    assert not [m for m in locate(load("llama").target, tiny.prompt(3, 9), [4, 5]).modules if m.kind == "cache"]


def test_a_given_state_is_used_and_left_as_it_was(load):
    target, prompt = load("qwen3_5").target, tiny.prompt(3, 9)
    cache = filled(target, prompt, 5)
    before = [mx.array(a) for layer in cache.layers[:3] for a in layer.cache]
    found = locate(target, [], [4, 5], cache=cache)
    assert found.prefix == cache.length == 9
    assert all(
        mx.array_equal(a, b)
        for a, b in zip(before, (a for layer in cache.layers[:3] for a in layer.cache), strict=True)
    )


def test_a_block_of_one_token_is_refused(load):
    with pytest.raises(RequestError, match="no width to compare"):
        locate(load("llama").target, [1, 2], [3])


def test_the_model_is_as_before_also_after_an_error(load):
    target = load("llama").target
    classes = [type(m) for _, m in target.model.named_modules()]
    with pytest.raises(Exception, match=r"."):
        locate(target, [1, 2], [3, "four"])
    locate(target, [1, 2], [3, 4])
    assert [type(m) for _, m in target.model.named_modules()] == classes
