"""DiffusionGemma against transformers' `DiffusionGemmaForBlockDiffusion`: both passes, within 5e-5 in float32."""

from __future__ import annotations

import canvas_tiny
import mlx.core as mx
import numpy as np
import pytest
from canvas_tiny import FULL, SLIDING

from mtplab.models.canvas import load_denoiser

torch = pytest.importorskip("torch", reason="torch is the reference of this parity test (pip install '.[test]')")

WITHIN = 5e-5
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16, "pooling_kernel_size": 1,
}  # fmt: skip
CASES = {
    "published pattern": {"layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL], "num_hidden_layers": 5},
    "many experts": {"num_experts": 16, "top_k_experts": 4},
    "one expert": {"num_experts": 1, "top_k_experts": 1},
    "biases, one kind of head": {"attention_bias": True, "num_global_key_value_heads": None, "global_head_dim": 8},
    "full layers only, other angles": {
        "layer_types": [FULL] * 3,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 5000.0},
            FULL: {"rope_type": "proportional", "rope_theta": 2e5, "partial_rotary_factor": 0.5},
        },
    },
}


def build(folder, text, seed):
    """A random transformers model with every parameter moved, saved by transformers itself."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    settings = canvas_tiny.config("gemma", text)
    model = DiffusionGemmaForBlockDiffusion(
        DiffusionGemmaConfig(
            text_config=settings["text_config"],
            vision_config={"model_type": "gemma4_vision"} | VISION,
            canvas_length=12,
        )
    )
    g = torch.Generator().manual_seed(seed)
    canvas_tiny.damp(model, g, embedding=0.5)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module", params=[(name, seed) for seed, name in enumerate(CASES)], ids=lambda p: p[0])
def pair(request, tmp_path_factory):
    name, seed = request.param
    folder = tmp_path_factory.mktemp("parity")
    reference = build(folder, CASES[name], seed)
    return reference, load_denoiser(folder)


def ids(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, canvas_tiny.tiny.VOCAB, n).tolist()


def assert_close(ours: mx.array, theirs) -> None:
    theirs = theirs.detach().numpy()
    assert ours.shape == theirs.shape and theirs.std() > 0.5
    assert np.abs(np.array(ours) - theirs).max() < WITHIN


@torch.no_grad()
def encoder_logits(reference, tokens):
    hidden = reference.model.encoder(input_ids=torch.tensor([tokens])).last_hidden_state
    return 30 * torch.tanh(reference.lm_head(hidden)[0] / 30)


@torch.no_grad()
def decoder_logits(reference, tokens, canvas, conditioning=None):
    given = None if conditioning is None else torch.tensor(np.array(conditioning))[None]
    out = reference(
        input_ids=torch.tensor([tokens]), decoder_input_ids=torch.tensor([canvas]), self_conditioning_logits=given
    )
    return out.logits[0]


@pytest.mark.parametrize("length", [1, 8, 30])
def test_encoder(pair, length):
    reference, ours = pair
    tokens = ids(length, length)
    assert_close(ours.encoder_logits(tokens), encoder_logits(reference, tokens))


@pytest.mark.parametrize(("prompt", "step"), [(3, 512), (8, 512), (30, 512), (30, 7)])
def test_decoder_with_and_without_self_conditioning(pair, prompt, step):
    """After prompts within and beyond the window of 8, written in one pass, in chunks and one by one."""
    reference, ours = pair
    size = 12 if step == 512 else 5
    tokens, canvas, cache = ids(prompt, prompt), ids(99, size), ours.new_cache()
    ours.prefill(tokens, cache, step=step)
    first = ours.denoise(mx.array(canvas), None, cache)
    assert_close(first, decoder_logits(reference, tokens, canvas))
    other = ids(98, size)
    second = ours.denoise(mx.array(other), ours.soft(first / 0.6), cache)
    assert_close(second, decoder_logits(reference, tokens, other, first / 0.6))
    assert mx.abs(second - ours.denoise(mx.array(other), None, cache)).max().item() > 0.05


def test_a_second_canvas_sees_the_committed_first(pair):
    reference, ours = pair
    tokens, first, second, cache = ids(1, 10), ids(2, 12), ids(3, 12), ours.new_cache()
    ours.prefill(tokens, cache)
    ours.commit(first, cache)
    assert cache.length == 22
    got = ours.denoise(mx.array(second), None, cache)
    assert_close(got, decoder_logits(reference, tokens + first, second))
    ours.commit(second[:5], cache)
    assert_close(
        ours.denoise(mx.array(first), None, cache), decoder_logits(reference, tokens + first + second[:5], first)
    )


def test_vision_tensors_are_left_out_and_the_scalars_are_not_tied(pair):
    reference, ours = pair
    saved = [n for n in reference.state_dict() if ".vision_tower." in n or ".embed_vision." in n]
    assert ours.facts["vision_tensors_left_out"] > 0
    assert ours.facts["vision_tensors_left_out"] <= len(saved)
    layer = ours.model.model.decoder.layers[0].layer_scalar.item()
    assert layer != ours.model.model.encoder.language_model.layers[0].layer_scalar.item()
