"""Canvas checkpoints on disk: strict names, every quantization kind, the checkpoint's own defaults, `inspect`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import canvas_tiny
import mlx.core as mx
import numpy as np
import pytest
import tiny

from mtplab.errors import ModelError, RequestError
from mtplab.models.canvas import load_denoiser
from mtplab.models.inspect import inspect_checkpoint
from mtplab.models.loader import load_target

KINDS = {
    "affine4": {"group_size": 32, "bits": 4, "mode": "affine"},
    "affine8": {"group_size": 32, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
EVEN = {"intermediate_size": 64}  # every input size a multiple of 32
MIXED = {"embed_tokens": "mxfp4", "self_attn": "nvfp4", "mlp": "affine8", "experts": "mxfp8", "router": "affine4"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return canvas_tiny.build(tmp_path_factory.mktemp("canvas") / "gemma", "gemma", text=EVEN)


@pytest.fixture
def gemma(source, tmp_path):
    return shutil.copytree(source, tmp_path / "gemma")


def weights_of(folder):
    return {k: mx.array(v) for k, v in mx.load(str(folder / "model.safetensors")).items()}


def edit(folder, change=None, **config):
    """Change the tensors by a function of their dict, and keys of config.json."""
    if change is not None:
        weights = weights_of(folder)
        change(weights)
        mx.eval(weights)
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def edit_text(folder, **text):
    config = json.loads((folder / "config.json").read_text())
    edit(folder, text_config=config["text_config"] | text)


def refused(folder, *parts, error=ModelError):
    with pytest.raises(error) as caught:
        load_denoiser(folder)
    for part in parts:
        assert part in str(caught.value)


def answers(model):
    """Logits of the encoder pass, of a first step and of a self-conditioned one."""
    cache = model.new_cache()
    model.prefill(tiny.prompt(1, 20), cache)
    first = model.denoise(mx.array(tiny.prompt(2, 12)), None, cache)
    return (
        model.encoder_logits(tiny.prompt(1, 20)),
        first,
        model.denoise(mx.array(tiny.prompt(3, 12)), model.soft(first / 0.5), cache),
    )


def packed_copies(folder, kind_of, tmp_path):
    """Two folders: modules packed as `kind_of(stem)` says, and the same values unpacked to float."""
    packed, plain, table = {}, {}, {}
    for name, a in weights_of(folder).items():
        stem = name.removesuffix(".weight")
        kind = KINDS.get(kind_of(stem)) if a.ndim >= 2 else None
        if kind is None:
            packed[name] = plain[name] = a
            continue
        parts = mx.quantize(a, **kind)
        packed |= {f"{stem}.{s}": p for s, p in zip(("weight", "scales", "biases"), parts, strict=False)}
        plain[name] = mx.dequantize(*parts, **kind).astype(mx.float32)
        table[stem] = kind
    config = json.loads((folder / "config.json").read_text())
    canvas_tiny.write(tmp_path / "packed", config | {"quantization": KINDS["affine4"] | table}, packed)
    canvas_tiny.write(tmp_path / "plain", config, plain)
    return load_denoiser(tmp_path / "packed"), load_denoiser(tmp_path / "plain")


def same(packed, plain):
    assert packed.facts["quantized"] and not plain.facts["quantized"]
    assert packed.facts["weight_bytes"] < plain.facts["weight_bytes"]
    for a, b in zip(answers(packed), answers(plain), strict=True):
        assert a.dtype == mx.float32
        assert mx.abs(a - b).max().item() < 2e-4


@pytest.mark.parametrize("kind", KINDS)
def test_every_quantization_kind_with_its_packed_soft_embedding(source, tmp_path, kind):
    packed, plain = packed_copies(source, lambda stem: kind, tmp_path)
    table = packed.model.model.decoder.embed_tokens
    assert table.mode == KINDS[kind]["mode"] and table.bits == KINDS[kind]["bits"]
    same(packed, plain)


def test_kinds_mixed_by_module_and_some_left_in_float(source, tmp_path):
    packed, plain = packed_copies(source, lambda s: next((k for p, k in MIXED.items() if p in s), ""), tmp_path)
    decoder = packed.model.model.decoder
    layer = decoder.layers[0]
    assert layer.self_attn.q_proj.mode == "nvfp4" and layer.mlp.up_proj.bits == 8
    assert (
        "scales" in layer.experts.gate_up_proj and "scales" not in packed.model.model.decoder.self_conditioning.up_proj
    )
    same(packed, plain)


def test_packed_experts_that_are_chosen_by_gather(tmp_path):
    text = EVEN | {"num_experts": 12, "top_k_experts": 3}
    folder = canvas_tiny.build(tmp_path / "many", "gemma", text=text)
    for kind in ("affine4", "mxfp4"):
        same(*packed_copies(folder, lambda s, kind=kind: kind if "experts" in s else "", tmp_path / kind))


@pytest.mark.parametrize(("dtype", "within"), [("float16", 0.02), ("bfloat16", 0.1)])
def test_16_bits_are_honoured_or_refused(source, tmp_path, dtype, within):
    whole, half = answers(load_denoiser(source)), answers(load_denoiser(source, dtype=dtype))
    for a, b in zip(whole, half, strict=True):
        assert b.dtype == mx.float32
        # The mean: a row whose router stood at a tie may well take another expert.
        assert 0 < mx.abs(a - b).mean().item() < within
    folder = canvas_tiny.build(tmp_path / "many", "gemma", text={"num_experts": 12})
    with pytest.raises(RequestError, match=f"{dtype} cannot be honoured"):
        load_denoiser(folder, dtype=dtype)


def test_biases_missing_or_not_wanted(source, tmp_path):
    stem = "model.decoder.embed_tokens"
    packed_copies(source, lambda s: "affine4", tmp_path)
    edit(tmp_path / "packed", lambda w: w.pop(f"{stem}.biases"))
    refused(tmp_path / "packed", stem, "affine", "lacks", "biases")
    packed_copies(source, lambda s: "mxfp4", tmp_path)
    edit(tmp_path / "packed", lambda w: w.update({f"{stem}.biases": mx.zeros((97, 1))}))
    refused(tmp_path / "packed", stem, "mxfp4", "has", "biases")


def test_a_declared_kind_that_the_tensors_are_not(source, tmp_path):
    packed_copies(source, lambda s: "mxfp8", tmp_path)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    config["quantization"]["model.decoder.embed_tokens"] = KINDS["affine8"]
    edit(tmp_path / "packed", quantization=config["quantization"])
    refused(tmp_path / "packed", "model.decoder.embed_tokens", "declared as", "mxfp8")


def test_tensors_missing_left_over_misshapen_or_damaged(gemma):
    name = "model.decoder.layers.1.router.scale"
    edit(gemma, lambda w: w.pop(name))
    refused(gemma, "lacks", name)
    edit(gemma, lambda w: w.update({name: mx.ones(31)}))
    refused(gemma, name, "[31]", "[32]")
    edit(gemma, lambda w: w.update({name: mx.ones(32), "model.decoder.layers.0.spare.weight": mx.ones(3)}))
    refused(gemma, "nobody uses", "model.decoder.layers.0.spare.weight")
    edit(gemma, lambda w: w.pop("model.decoder.layers.0.spare.weight"))
    load_denoiser(gemma)
    edit(gemma, lambda w: w.update({name: mx.full((32,), float("nan"))}))
    refused(gemma, name, "not finite")


def test_a_full_layer_with_its_own_values_is_left_over_and_the_encoder_scalar_is_needed(gemma):
    edit(gemma, lambda w: w.update({"model.decoder.layers.2.self_attn.v_proj.weight": mx.ones((16, 32))}))
    refused(gemma, "nobody uses", "layers.2.self_attn.v_proj.weight")
    edit(gemma, lambda w: w.pop("model.decoder.layers.2.self_attn.v_proj.weight"))
    edit(gemma, lambda w: w.pop("model.encoder.language_model.layers.2.layer_scalar"))
    refused(gemma, "lacks", "model.encoder.language_model.layers.2.layer_scalar")


def test_tied_copies_are_accepted_only_where_they_are_copies(gemma):
    copies = {
        "lm_head.weight": "model.decoder.embed_tokens.weight",
        "model.encoder.language_model.norm.weight": "model.decoder.norm.weight",
        "model.encoder.language_model.layers.0.experts.down_proj": "model.decoder.layers.0.experts.down_proj",
    }
    before = answers(load_denoiser(gemma))
    edit(gemma, lambda w: w.update({copy: w[original] for copy, original in copies.items()}))
    assert all(mx.array_equal(a, b) for a, b in zip(before, answers(load_denoiser(gemma)), strict=True))
    edit(gemma, lambda w: w.update({"model.encoder.language_model.norm.weight": w["model.decoder.norm.weight"] + 1}))
    refused(gemma, "model.encoder.language_model.norm.weight", "differs")


def test_the_scalars_of_the_two_passes_are_their_own(gemma):
    """The encoder's changes the encoder pass and what the decoder reads; the decoder's changes the decoder alone."""
    before = answers(load_denoiser(gemma))
    edit(gemma, lambda w: w.update({"model.decoder.layers.0.layer_scalar": mx.array([1.5])}))
    after = answers(load_denoiser(gemma))
    assert mx.array_equal(before[0], after[0])
    assert not mx.allclose(before[1], after[1], atol=1e-3)
    edit(gemma, lambda w: w.update({"model.encoder.language_model.layers.0.layer_scalar": mx.array([1.5])}))
    last = answers(load_denoiser(gemma))
    assert not mx.allclose(after[0], last[0], atol=1e-3)
    assert not mx.allclose(after[1], last[1], atol=1e-3)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ({"hidden_size": None}, ("lacks hidden_size",)),
        ({"hidden_activation": "silu"}, ("hidden_activation", "silu")),
        ({"use_bidirectional_attention": "all"}, ("use_bidirectional_attention", "all")),
        ({"top_k_experts": 5}, ("top_k_experts", "5")),
        ({"layer_types": ["linear_attention"] * 3}, ("layer_types",)),
        ({"num_hidden_layers": 4}, ("layer_types",)),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}},
            ("rope_parameters", "yarn"),
        ),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, ("per_layer_config", "alike")),
        ({"per_layer_config": {"1": {"head_dim": 16}, "2": {"head_dim": 8}}}, ("per_layer_config",)),
    ],
)
def test_what_the_module_does_not_do_is_refused(gemma, text, parts):
    edit_text(gemma, **text)
    refused(gemma, *parts)


def test_untied_weights_are_refused(gemma):
    edit(gemma, tie_word_embeddings=False)
    refused(gemma, "tie_word_embeddings")


def test_the_cap_may_come_from_the_config(gemma):
    free = load_denoiser(gemma).encoder_logits([1, 2, 3])
    edit_text(gemma, final_logit_softcapping=5.0)
    capped = load_denoiser(gemma).encoder_logits([1, 2, 3])
    np.testing.assert_allclose(np.array(capped), 5 * np.tanh(np.arctanh(np.array(free) / 30) * 6), atol=1e-3)


def test_each_kind_of_checkpoint_goes_to_its_own_loader(gemma, checkpoints):
    refused(checkpoints("llama"), "'llama'", "no canvas model", "generate and sweep")
    with pytest.raises(ModelError, match=r"canvas model.*mtplab denoise"):
        load_target(gemma)
    refused(gemma / "nowhere", "neither a checkpoint folder nor a hub id")
    with pytest.raises(RequestError, match="'float8'"):
        load_denoiser(gemma, dtype="float8")


def test_defaults_are_the_checkpoints_and_say_where_they_come_from(gemma):
    model = load_denoiser(gemma)
    assert model.defaults == {"canvas": 12} and model.default_sources == {"canvas": "config.json: canvas_length"}
    generation = {
        "max_denoising_steps": 16,
        "t_max": 1,
        "sampler_config": {"entropy_bound": 0.2},
        "eos_token_id": [5, 9],
    }
    (gemma / "generation_config.json").write_text(json.dumps(generation))
    model = load_denoiser(gemma)
    assert model.defaults == {"canvas": 12, "steps": 16, "t_max": 1.0, "entropy_bound": 0.2}
    assert model.default_sources["entropy_bound"] == "generation_config.json: sampler_config.entropy_bound"
    assert model.eos_ids == {5, 9}
    for key, bad in (
        ("max_denoising_steps", 0),
        ("max_denoising_steps", 2.5),
        ("t_min", -1),
        ("t_max", True),
        ("t_min", "a"),
        ("max_new_tokens", 0),
        ("max_new_tokens", -5),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", "64"),
    ):
        (gemma / "generation_config.json").write_text(json.dumps({key: bad}))
        refused(gemma, key, repr(bad))


def test_ids_and_shapes_are_checked_before_mlx_reads_past_the_end(gemma):
    model = load_denoiser(gemma)
    cache = model.new_cache()
    for tokens, part in (([3, 97], "token 97"), ([-1], "token -1"), ([], "at least one token")):
        for feed in (model.prefill, model.commit):
            with pytest.raises(RequestError, match=part):
                feed(tokens, cache)
        with pytest.raises(RequestError, match=part):
            model.encoder_logits(tokens)
    assert cache.length == 0 and cache.arrays() == []
    for length in (0, 13):
        with pytest.raises(RequestError, match=f"1 to 12 positions in this model, not \\[{length}\\]"):
            model.denoise(mx.zeros((length,), mx.int32), None, cache)
    with pytest.raises(ModelError, match=r"\[12, 32\], not \[12, 97\]"):
        model.denoise(mx.zeros((12,), mx.int32), mx.zeros((12, 97)), cache)


def test_inspect_sorts_a_checkpoint_as_the_loader_does_and_imports_no_mlx(gemma):
    extra = {"model.encoder.vision_tower.a.weight": mx.ones((64, 64)), "lm_head.weight": mx.ones((97, 32))}
    edit(gemma, lambda w: w.update(extra))
    (gemma / "generation_config.json").write_text(json.dumps({"max_denoising_steps": 16}))
    told = inspect_checkpoint(gemma)
    canvas = told["canvas"]
    assert canvas["vision"].startswith("1 tensors") and canvas["tied_copies"] == 1
    assert canvas["length"] == 12 and canvas["experts"] == 4 and canvas["start"] == "uniform random ids"
    assert canvas["defaults"]["steps"] == "16 (generation_config.json: max_denoising_steps)"
    assert told["cache"]["layers"] == {"sliding": 1, "full": 2}
    full = 2 * 2 * 1 * 16 * 2  # two layers, keys and values, one head of 16, 16 bits
    assert told["memory"]["4096"] == told["bytes"]["total"] - 64 * 64 * 4 + 4096 * full
    assert told["arms"]["denoise"] == "yes" and "denoise" in told["arms"]["baseline"]
    edit_text(gemma, hidden_activation="silu")
    assert "hidden_activation" in inspect_checkpoint(gemma)["canvas"]["loads"]
    code = (
        "import sys; from mtplab.models.inspect import inspect_checkpoint as f; "
        f"f({str(gemma)!r}); print('mlx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
