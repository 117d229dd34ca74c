"""The bundled canvas model: what its card claims, and parity with the torch twin that trained it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mtplab.models import DATA, bundled
from mtplab.models.canvas import load_denoiser

ROOT = Path(__file__).resolve().parents[3]
PROMPT = 64


@pytest.fixture(scope="module")
def lab():
    return load_denoiser("lab-canvas")


@pytest.fixture(scope="module")
def texts(lab):
    """Held-out prompts of both corpora as ids, 100 or more tokens each."""
    out = {}
    for kind in ("novel", "c"):
        lines = (DATA / "corpora" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        out[kind] = [lab.tokenizer.encode(json.loads(line)["text"])[:100] for line in lines]
    return out


def nll(logits: mx.array, ids: list[int]) -> float:
    picked = mx.take_along_axis(logits, mx.array(ids)[:, None], axis=-1)[:, 0]
    return (mx.logsumexp(logits, axis=-1) - picked).mean().item()


def test_it_fits_and_says_what_it_is(lab):
    folder = bundled("lab-canvas")
    assert sum(p.stat().st_size for p in folder.iterdir()) <= 12e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    for word in ("perplexity", "noise", "steps", "public domain", "evaluate.py"):
        assert word in card
    assert (folder / "tokenizer.json").read_bytes() == (bundled("lab-mtp") / "tokenizer.json").read_bytes()
    assert lab.eos_ids == {0}
    assert lab.defaults == {
        "canvas": 32, "steps": 48, "t_min": 0.4, "t_max": 0.8, "entropy_bound": 0.1,
        "stability_threshold": 1, "confidence_threshold": 0.005,
    }  # fmt: skip
    assert all("config.json" in source for source in lab.default_sources.values())


def test_the_encoder_pass_is_a_language_model_of_both_texts(lab, texts):
    loss = {k: np.mean([nll(lab.encoder_logits(ids[:-1]), ids[1:]) for ids in rows[:8]]) for k, rows in texts.items()}
    assert loss["c"] < loss["novel"] < math.log(200)


def denoised(lab, ids: list[int], share: float, seed: int) -> tuple[float, float]:
    """Loss of the canvas after PROMPT tokens at a share of noise: first step, and second with the first fed back."""
    rng, cache = np.random.default_rng(seed), lab.new_cache()
    lab.prefill(ids[:PROMPT], cache)
    wanted = ids[PROMPT : PROMPT + 32]
    noisy = np.where(rng.random(32) < share, rng.integers(0, lab.vocab, 32), wanted)
    first = lab.denoise(mx.array(noisy), None, cache)
    return nll(first, wanted), nll(lab.denoise(mx.array(noisy), lab.soft(first / 0.6), cache), wanted)


def test_the_decoder_pass_tells_noise_from_text(lab, texts):
    """The less noise, the smaller the loss over all positions, at the first step and with its answer fed back."""
    rows = [ids for kind in texts.values() for ids in kind[:4]]
    losses = {s: np.mean([denoised(lab, ids, s, i) for i, ids in enumerate(rows)], axis=0) for s in (0.0, 0.5, 1.0)}
    for fed_back in (0, 1):
        a, b, c = (losses[s][fed_back] for s in (0.0, 0.5, 1.0))
        assert a + 1 < b and b + 1 < c < math.log(lab.vocab) - 1


def test_both_passes_equal_the_torch_twin(lab, texts):
    """The twin runs all canvases of a window at once; here one goes at a time through the cache. Within 2e-4."""
    torch = pytest.importorskip("torch", reason="torch is the reference of this parity test (pip install '.[test]')")
    sys.path.insert(0, str(ROOT / "experiments" / "010_lab_canvas"))
    try:
        from twin import Config, LabCanvas
    finally:
        sys.path.pop(0)
    from safetensors.torch import load_file

    twin = LabCanvas(Config())
    twin.load_state_dict({k: v.float() for k, v in load_file(str(lab.folder / "model.safetensors")).items()})
    ids = (texts["novel"][0] + texts["c"][0])[:160]
    noisy = np.random.default_rng(1).integers(0, lab.vocab, 160)
    with torch.no_grad():
        x, past = twin.encode(torch.tensor([ids]))
        causal = twin.logits(x)[0].numpy()
        first = twin.denoise(torch.tensor(noisy)[None], None, past)
        second = twin.denoise(torch.tensor(noisy)[None], (first / 0.6).softmax(-1), past)
    assert np.abs(np.array(lab.encoder_logits(ids)) - causal).max() < 2e-4
    for at in (32, 128):
        cache = lab.new_cache()
        lab.prefill(ids[:at], cache)
        canvas = mx.array(noisy[at : at + 32])
        got = lab.denoise(canvas, None, cache)
        assert np.abs(np.array(got) - first[0, at : at + 32].numpy()).max() < 2e-4
        got = lab.denoise(canvas, lab.soft(mx.array(first[0, at : at + 32].numpy()) / 0.6), cache)
        assert np.abs(np.array(got) - second[0, at : at + 32].numpy()).max() < 2e-4
