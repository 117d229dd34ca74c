"""The target surface: mlx-lm's numbers, hidden states without touching classes or parameter paths."""

from __future__ import annotations

import gc
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from mlx.utils import tree_flatten

from mtplab.errors import ModelError
from mtplab.models import loader, mlxlm
from mtplab.models.tap import tap, untap

KINDS = ["llama", "mimo", "qwen3_5", "gemma3_text"]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_mlx_lms_own(load, checkpoints, kind):
    """Our loader's fast path gives what mlx_lm.load_model gives."""
    from mlx_lm.utils import load_model

    loaded, tokens = load(kind), tiny.prompt(1, 20)
    theirs = load_model(checkpoints(kind))[0](mx.array([tokens]))[0]
    ours = loaded.target.forward(mx.array(tokens), loaded.target.new_cache())
    assert mx.array_equal(ours.logits, theirs)
    assert ours.hidden.shape == (20, 32)


@pytest.mark.parametrize("kind", ["llama", "mimo", "qwen3_5"])
def test_unembedding_the_hidden_states_gives_the_logits(load, kind):
    target = load(kind).target
    out = target.forward(mx.array(tiny.prompt(1, 9)), target.new_cache())
    assert mx.array_equal(target.unembed(out.hidden), out.logits)


def test_hidden_before_the_final_norm(checkpoints):
    post, pre = (loader.load_target(checkpoints("mimo"), hidden=h).target for h in ("post", "pre"))
    a, b = (t.forward(mx.array([1, 2, 3]), t.new_cache()).hidden for t in (post, pre))
    assert not mx.allclose(a, b, atol=0.1)
    assert mx.array_equal(pre.inner.norm(b), a)


def test_parameter_paths_and_classes_stay(checkpoints):
    """The published names are still there, and another instance of the class reports to nobody."""
    config = dict(tiny.QWEN3_5)
    model_class, args_class = mlxlm.classes(config)
    fresh = model_class(args_class.from_dict(config))
    before, call = {n for n, _ in tree_flatten(fresh.parameters())}, model_class.__call__
    target = loader.load_target(checkpoints("qwen3_5")).target
    assert {n for n, _ in tree_flatten(target.model.parameters())} == before
    assert model_class.__call__ is call and type(fresh.layers[0]).__name__ == "DecoderLayer"
    assert type(fresh.layers[0]) is not type(target.model.layers[0])
    assert isinstance(target.model.layers[0], type(fresh.layers[0]))


def test_tap_and_untap():
    seen, linear = [], nn.Linear(3, 2)
    tap(linear, lambda args, kwargs, out: seen.append((args[0], out)))
    x = mx.ones((1, 3))
    y = linear(x)
    assert len(seen) == 1 and seen[0][0] is x and seen[0][1] is y
    untap(linear)
    assert mx.array_equal(linear(x), y) and len(seen) == 1 and type(linear) is nn.Linear
    untap(linear)


def test_a_float16_checkpoint_runs_in_float32_on_the_cpu_and_says_so(tmp_path, checkpoints):
    folder = tiny.build(tmp_path / "h", "mimo")
    weights = {k: v.astype(mx.float16) for k, v in mx.load(str(folder / "model.safetensors")).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    loaded = loader.load_target(folder)
    assert loaded.facts["dtype"] == "float32" and loaded.target.model.model.norm.weight.dtype == mx.float32
    half = loader.load_target(folder, dtype="float16")
    assert half.facts["dtype"] == "float16" and half.head.layers[0].proj.weight.dtype == mx.float16


def test_a_hub_id_that_cannot_be_had(monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise ConnectionError("no route\nand a second line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError) as caught:
        loader.load_target("some-owner/some-model")
    assert "could not be fetched from the hub: no route" in str(caught.value) and "\n" not in str(caught.value)


def test_architectures_load_without_mlx_lms_start_up():
    """transformers and torch stay out of a decoding process; mlx_lm itself still works afterwards."""
    code = (
        "import sys; from mtplab import backend; backend.setup(); from mtplab.models import mlxlm;"
        "mlxlm.classes({'model_type': 'mimo'});"
        "assert not {'transformers', 'torch', 'mlx_lm.utils'} & set(sys.modules);"
        "import mlx_lm; assert callable(mlx_lm.stream_generate); print('fine')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "fine", out.stderr


@pytest.mark.parametrize("tokens", [[5], [1, 2, 3]])
def test_active_memory_stays_flat_but_for_the_kv(load, tokens):
    gc.collect()  # models of earlier tests must not be freed in between
    target = load("qwen3_5").target
    cache, sizes = target.new_cache(), []
    for step in range(600):
        with cache.attempt(len(tokens)) as attempt:
            mx.eval(target.forward(mx.array(tokens), cache).logits, cache.arrays())
            attempt.keep(1)
        if step in (250, 599):
            mx.eval(cache.arrays())
            mx.clear_cache()
            sizes.append(mx.get_active_memory() - cache.nbytes)
    assert abs(sizes[1] - sizes[0]) < 64 * 1024
