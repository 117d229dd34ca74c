"""LLaDA 2: its layout on disk, and its passes against a torch form of the published model without any cache."""

from __future__ import annotations

import json

import canvas_tiny
import mlx.core as mx
import numpy as np
import pytest
import tiny

from mtplab.decode.settings import Settings
from mtplab.errors import ModelError, RequestError
from mtplab.models.canvas import load_denoiser
from mtplab.records import canvas_metrics
from mtplab.trials.canvas_arms import Session

BLOCK = canvas_tiny.LLADA["block_length"]
MASK = canvas_tiny.LLADA["mask_token_id"]
WITHIN = 5e-5
CHANGES = {
    "published pattern": {},
    "many experts, biases, tied": {
        "num_experts": 16, "num_experts_per_tok": 4, "use_qkv_bias": True, "tie_word_embeddings": True,
    },
    "no shared expert, no head norms": {"num_shared_experts": 0, "use_qk_norm": False, "partial_rotary_factor": 1.0},
}  # fmt: skip


@pytest.fixture(scope="module", params=CHANGES)
def folder(request, tmp_path_factory):
    return canvas_tiny.build(tmp_path_factory.mktemp("llada") / "model", "llada", **CHANGES[request.param])


def reference(folder, tokens: list[int]) -> np.ndarray:
    """Logits of every row in torch, all rows at once: row r sees the columns up to the end of its block."""
    torch = pytest.importorskip("torch", reason="torch is the reference here (pip install '.[test]')")
    from torch.nn import functional as F

    c = json.loads((folder / "config.json").read_text())
    w = {k: torch.tensor(np.array(v)) for k, v in mx.load(str(folder / "model.safetensors")).items()}
    heads, kv, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    turned, rows = int(size * c["partial_rotary_factor"]), torch.arange(len(tokens))
    angle = rows[:, None] * c["rope_theta"] ** (-torch.arange(0, turned, 2) / turned)
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], w[name], c["rms_norm_eps"])

    def rope(x):
        a, b = x[..., :turned], x[..., turned:]
        half = torch.cat([-a[..., turned // 2 :], a[..., : turned // 2]], -1)
        return torch.cat([a * cos + half * sin, b], -1)

    def mlp(x, p):
        gate, up, down = (w[f"{p}.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def sparse(x, p):
        scores = (x @ w[f"{p}.gate.weight"].T).sigmoid()
        weights = torch.zeros_like(scores)
        for r, row in enumerate(scores + w[f"{p}.gate.expert_bias"]):
            by_group = row.view(c["n_group"], -1)
            best = by_group.topk(2, -1)[0].sum(-1).topk(c["topk_group"])[1].tolist()
            allowed = [g * by_group.shape[1] + e for g in best for e in range(by_group.shape[1])]
            chosen = sorted(allowed, key=lambda e: -row[e].item())[: c["num_experts_per_tok"]]
            weights[r, chosen] = scores[r, chosen] / scores[r, chosen].sum() * c["routed_scaling_factor"]
        out = sum(weights[:, e, None] * mlp(x, f"{p}.experts.{e}") for e in range(c["num_experts"]))
        return out + mlp(x, f"{p}.shared_experts") if c["num_shared_experts"] else out

    seen = rows[None] < (rows[:, None] // BLOCK + 1) * BLOCK
    x = w["model.word_embeddings.weight"][torch.tensor(tokens)]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        h = norm(x, f"{p}.input_layernorm.weight")
        qkv = F.linear(h, w[f"{p}.attention.query_key_value.weight"], w.get(f"{p}.attention.query_key_value.bias"))
        q, k, v = qkv.view(len(tokens), -1, size).transpose(0, 1).split([heads, kv, kv])
        if c.get("use_qk_norm", True):
            q, k = norm(q, f"{p}.attention.query_layernorm.weight"), norm(k, f"{p}.attention.key_layernorm.weight")
        k, v = (a.repeat_interleave(heads // kv, 0) for a in (rope(k), v))
        scores = (rope(q) @ k.transpose(1, 2) * size**-0.5).masked_fill(~seen, float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + y @ w[f"{p}.attention.dense.weight"].T
        h = norm(x, f"{p}.post_attention_layernorm.weight")
        x = x + (mlp if i < c["first_k_dense_replace"] else sparse)(h, f"{p}.mlp")
    head = w["model.word_embeddings.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
    return (norm(x, "model.norm.weight") @ head.T).numpy()


def assert_close(got: mx.array, wanted: np.ndarray) -> None:
    """Within 5e-5 everywhere but at the mask's id, which is no answer."""
    got = np.array(got)
    assert got.shape == wanted.shape and wanted.std() > 0.3
    assert np.isneginf(got[:, MASK]).all()
    rest = np.arange(wanted.shape[1]) != MASK
    assert np.abs(got - wanted)[:, rest].max() < WITHIN


@pytest.mark.parametrize("prompt", [1, 8, 21])
def test_a_canvas_after_a_prompt_equals_the_whole_text_without_a_cache(folder, prompt):
    """Prompts within a block, at its end and past several; a canvas that fills the block, and the next one."""
    model = load_denoiser(folder)
    tokens, cache = tiny.prompt(prompt, prompt), model.new_cache()
    model.prefill(tokens, cache)
    assert model.room(cache) == BLOCK - prompt % BLOCK
    assert cache.length == prompt // BLOCK * BLOCK and len(cache.tail) == prompt % BLOCK
    canvas = [MASK] * model.room(cache)
    canvas[0] = 7
    got = model.denoise(mx.array(canvas), None, cache)
    assert_close(got, reference(folder, tokens + canvas)[prompt:])
    done = [(t + 3) % MASK for t in canvas]
    model.commit(done, cache)
    assert cache.length == prompt + len(done) and cache.tail == () and model.room(cache) == BLOCK
    got = model.denoise(mx.array([MASK] * BLOCK), None, cache)
    assert_close(got, reference(folder, tokens + done + [MASK] * BLOCK)[prompt + len(done) :])


def test_a_canvas_over_the_end_of_a_block_sees_what_each_row_may(folder):
    model = load_denoiser(folder)
    tokens, cache = tiny.prompt(1, 5), model.new_cache()
    model.prefill(tokens, cache)
    canvas = [MASK] * BLOCK
    assert_close(model.denoise(mx.array(canvas), None, cache), reference(folder, tokens + canvas)[5:])


def test_the_prompt_in_chunks_gives_the_same_cache_and_a_step_writes_nothing(folder):
    model, tokens = load_denoiser(folder), tiny.prompt(3, 29)
    caches = [model.new_cache() for _ in range(3)]
    for cache, step in zip(caches, (512, 16, 3), strict=True):
        model.prefill(tokens, cache, step=step)
    before = [np.array(a) for a in caches[0].arrays()]
    model.denoise(mx.array([MASK] * 3), None, caches[0])
    for cache in caches:
        assert cache.length == 24 and cache.tail == tuple(tokens[24:])
        for a, b in zip(before, cache.arrays(), strict=True):
            np.testing.assert_allclose(np.array(b), a, atol=1e-5)
    assert all(np.array_equal(a, np.array(b)) for a, b in zip(before, caches[0].arrays(), strict=True))


@pytest.mark.parametrize("prompt", [3, BLOCK, 2 * BLOCK + 3])
@pytest.mark.parametrize("length", [3, BLOCK])
def test_the_passes_in_a_record_are_the_passes_that_ran(folder, prompt, length, monkeypatch):
    """A prompt shorter than a block, and a canvas that ends inside one, leave a tail and cost no pass of their own."""
    model, ran = load_denoiser(folder), []
    run = model.model.run
    monkeypatch.setattr(model.model, "run", lambda tokens, *rest: ran.append(len(tokens)) or run(tokens, *rest))
    session = Session(model, {"canvas": length, "steps": 2})
    settings = Settings(max_tokens=2 * BLOCK, ignore_eos=True, prefill_step=BLOCK)
    record = session.request(tiny.prompt(1, prompt), request=0, settings=settings)
    passes = canvas_metrics.forwards([record])
    assert passes.prefill == record.prefill.forwards == prompt // BLOCK
    assert passes.denoise == len(record.steps) and sum(passes) == len(ran)
    assert passes.commit < len(record.canvases)


def test_converted_layouts_give_the_same_model(tmp_path):
    """Experts stacked under switch_mlp, names under language_model, as conversions have them; packed by expert."""
    a = canvas_tiny.build(tmp_path / "a", "llada", num_experts=12, intermediate_size=64, moe_intermediate_size=32)
    config, weights = json.loads((a / "config.json").read_text()), mx.load(str(a / "model.safetensors"))
    stacked = {}
    for name, value in weights.items():
        if ".experts." in name:
            stem, _, rest = name.partition(".experts.")
            which, _, tail = rest.partition(".")
            stacked.setdefault(f"language_model.{stem}.switch_mlp.{tail}", {})[int(which)] = value
        else:
            stacked["language_model." + name] = value
    merged = {n: mx.stack([v[i] for i in sorted(v)]) if isinstance(v, dict) else v for n, v in stacked.items()}
    b = canvas_tiny.write(tmp_path / "b", config, merged)
    kind, packed, plain = {"group_size": 32, "bits": 8, "mode": "affine"}, {}, {}
    for name, value in weights.items():
        if ".experts." not in name:
            packed[name] = plain[name] = value
            continue
        parts = mx.quantize(value, **kind)
        suffixes = ("weight", "scales", "biases")
        packed |= {name.removesuffix("weight") + s: p for s, p in zip(suffixes, parts, strict=True)}
        plain[name] = mx.dequantize(*parts, **kind)
    c = canvas_tiny.write(tmp_path / "c", config | {"quantization": kind}, packed)
    d = canvas_tiny.write(tmp_path / "d", config, plain)
    out = []
    for folder in (a, b, c, d):
        model = load_denoiser(folder)
        cache = model.new_cache()
        model.prefill(tiny.prompt(1, 11), cache)
        out.append(model.denoise(mx.array([MASK] * 5), None, cache)[:, : MASK - 1])
    assert mx.array_equal(out[0], out[1])
    assert mx.abs(out[2] - out[3]).max().item() < 2e-4 < mx.abs(out[0] - out[2]).max().item()


def test_what_this_family_cannot_do_is_said(tmp_path):
    folder = canvas_tiny.build(tmp_path / "llada", "llada")
    model = load_denoiser(folder)
    assert (model.start, model.mask_id, model.canvas, model.self_conditioning) == ("mask", MASK, BLOCK, False)
    with pytest.raises(RequestError, match="no self-conditioning"):
        model.denoise(mx.array([MASK]), mx.zeros((1, model.vocab)), model.new_cache())
    with pytest.raises(RequestError, match="scoring model"):
        model.encoder_logits([1, 2])
    weights = dict(mx.load(str(folder / "model.safetensors")).items())
    lacking = {n: a for n, a in weights.items() if ".experts.3." not in n}
    canvas_tiny.write(tmp_path / "gap", canvas_tiny.config("llada"), lacking)
    with pytest.raises(ModelError, match=r"experts\.0\..*\[7, .*\[8, "):
        load_denoiser(tmp_path / "gap")
    for key, value in (("rope_scaling", {"type": "yarn"}), ("mask_token_id", 97), ("n_group", 8), ("vocab_size", None)):
        canvas_tiny.write(tmp_path / "odd", canvas_tiny.config("llada", **{key: value}), weights)
        with pytest.raises(ModelError, match=key):
            load_denoiser(tmp_path / "odd")
