"""Step by step with transformers: the same injected draws give the same canvas after every step and the same text.

torch's `multinomial(p, 1)` is `argmax(p / Exp(1))` under the same seed, so the reference's own random numbers can be
drawn again beside it, in its order: one randint for a canvas, then per step Exp(1) of [C, V] and one randint.
"""

from __future__ import annotations

import canvas_tiny
import mlx.core as mx
import numpy as np
import pytest
from canvas_tiny import FULL, SLIDING
from mtplab.kernels.canvas_rows import canvas_rows

from mtplab.backend.clock import ScriptedClock
from mtplab.decode.canvas import Draws, denoise
from mtplab.decode.canvas_policy import CanvasPolicy
from mtplab.decode.settings import Settings
from mtplab.decode.stopping import Stops
from mtplab.models.canvas import load_denoiser
from mtplab.records.canvas import Canvas, DenoiseStep

torch = pytest.importorskip("torch", reason="torch is the reference of this parity test (pip install '.[test]')")

torch.set_num_threads(1)  # the tensors are tiny: a second thread costs more than it does
C, V = 12, canvas_tiny.tiny.VOCAB
VISION = {
    "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
    "pooling_kernel_size": 1,
}  # fmt: skip


@pytest.fixture(scope="module", params=[0, 1], ids=["window 8", "two experts of eight"])
def pair(request, tmp_path_factory):
    """transformers' model and ours, from files that transformers wrote. Sharp enough for canvases to settle."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    text = [{}, {"num_experts": 8, "layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 5}][request.param]
    settings = canvas_tiny.config("gemma", text)
    model = DiffusionGemmaForBlockDiffusion(
        DiffusionGemmaConfig(text_config=settings["text_config"], vision_config=VISION, canvas_length=C)
    )
    g = torch.Generator().manual_seed(request.param)
    canvas_tiny.damp(model, g, embedding=0.8)
    folder = tmp_path_factory.mktemp("pair")
    model.save_pretrained(folder)
    return model.eval(), load_denoiser(folder)


class TorchDraws(Draws):
    """The reference's random numbers, drawn in its order."""

    def __init__(self, seed: int):
        self.g = torch.Generator().manual_seed(seed)

    def _ids(self, *_):
        return torch.randint(0, V, (1, C), generator=self.g)[0].numpy().astype(np.int32)

    def rows(self, scaled, canvas, step, *, sampled, expect=None):
        drawn = mx.array(torch.empty(C, V).exponential_(1, generator=self.g).numpy()) if sampled else None
        self.fresh = self._ids()
        return canvas_rows(scaled, 1.0, noise=drawn, expect=expect)

    def renoise(self, *_):
        return self.fresh


def reference(model, prompt, seed, tokens, monkeypatch, *, sampled, **options):
    """(canvases after every step, argmax canvases after every step, all tokens) of transformers' own loop."""
    if not sampled:
        monkeypatch.setattr(torch, "multinomial", lambda p, num_samples: p.argmax(-1, keepdim=True))
    after, best = [], []
    step = type(model)._denoising_step

    def watched(*args, **kwargs):
        out = step(model, *args, **kwargs)
        after.append(out[0][0].tolist())
        best.append(tuple(out[1][0].tolist()))
        return out

    monkeypatch.setattr(model, "_denoising_step", watched)
    torch.manual_seed(seed)
    made = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, eos_token_id=None, **options)
    return after, best, made.sequences[0, len(prompt) :].tolist()


class Watching:
    """Ours, with the canvas of every forward pass noted."""

    def __init__(self, denoiser):
        self.inner, self.seen = denoiser, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def denoise(self, canvas, soft, cache):
        self.seen.append(np.array(canvas).tolist())
        return self.inner.denoise(canvas, soft, cache)


CASES = {
    "entropy bound, past the window": (True, {"max_denoising_steps": 6}),
    "argmax": (False, {"max_denoising_steps": 6, "bound": 2.0}),
    "early stop": (True, {"max_denoising_steps": 9, "bound": 8.0, "confidence_threshold": 3.0}),
    "early stop, argmax, other heat, past the window": (
        False,
        {"max_denoising_steps": 9, "bound": 8.0, "confidence_threshold": 3.0, "t_min": 0.2, "t_max": 1.1},
    ),
}


@pytest.mark.parametrize(("case", "length"), list(zip(CASES, (19, 3, 3, 19), strict=True)), ids=list(CASES))
def test_every_step_of_several_canvases_is_the_references(pair, case, length, monkeypatch):
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    model, denoiser = pair
    sampled, options = CASES[case]
    options, seed = dict(options), 11 + length
    bound = options.pop("bound", 0.1)
    prompt = np.random.default_rng(length).integers(0, V, length).tolist()
    after, best, text = reference(
        model, prompt, seed, 3 * C, monkeypatch, sampled=sampled,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=bound), **options,
    )  # fmt: skip
    policy = CanvasPolicy(
        steps=options["max_denoising_steps"], canvas=C, bound=bound, proposal="sampled" if sampled else "argmax",
        t_min=options.get("t_min", 0.4), t_max=options.get("t_max", 0.8),
        confidence=options.get("confidence_threshold", 0.005),
    )  # fmt: skip
    watched, settings = Watching(denoiser), Settings(max_tokens=3 * C)
    records = list(
        denoise(
            watched, prompt, policy=policy, settings=settings, stops=Stops(settings), clock=ScriptedClock(1),
            draws=TorchDraws(seed),
        )
    )  # fmt: skip
    steps = [r for r in records if isinstance(r, DenoiseStep)]
    canvases = [r for r in records if isinstance(r, Canvas)]
    assert [s.tokens for s in steps] == best
    # The canvas that goes into a step is the one the step before left; the last of each canvas is only the reference's.
    ours = [ids for s, ids in zip(steps, watched.seen, strict=True) if s.index]
    theirs = [ids for s, ids in zip(steps, after, strict=True) if s.index + 1 < canvases[s.canvas].steps]
    assert ours == theirs and len(ours) >= 3
    assert [t for c in canvases for t in c.tokens] == text
    if case.startswith("early"):
        assert {c.stop for c in canvases} == {"stable"}, "this case is about stopping before the cap"
