"""mtplab's canvas loop against mlx-vlm's and transformers', on the same DiffusionGemma weights.

All sides denoise the same number of canvases with the same number of steps, float32, the entropy-bound sampler at its
published settings, sampled proposals, no early stop (mlx-vlm stops early only where generation_config names a
threshold, mtplab is told not to), and read every finished canvas on the host. mlx-vlm decodes text as it goes; here it
gets a tokenizer that does nothing. mlx-vlm leaves out acceptance in the last step, mtplab does not.

Time is read as each canvas is handed over. `canvas_ms` = (t_last - t_first) / (canvases - 1): a commit and all steps;
`step_ms` = that over the steps; `cpu_ms` = CPU time a step, which a busy machine disturbs less. Prefill and start-up
are in none of them.

`--model tiny` and `--model small` build random checkpoints; a folder or a bundled name is taken as it is. mlx-vlm may
live elsewhere: `--mlx-vlm .../site-packages` is searched last, so that both sides run on the same mlx. Sides that are
not installed are left out with `--sides`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common

from mtplab.errors import RequestError

SIDES = ("mtplab", "mlx_vlm", "transformers")
SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {
    "tiny": {
        "canvas": 32,
        "text": {
            "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16,
            "global_head_dim": 32, "moe_intermediate_size": 64, "sliding_window": 64,
        },
    },
    "small": {
        "canvas": 64,
        "text": {
            "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64,
            "global_head_dim": 128, "moe_intermediate_size": 128, "sliding_window": 128, "num_hidden_layers": 6,
            "layer_types": [SLIDING, SLIDING, FULL] * 2, "num_experts": 8,
        },
    },
}  # fmt: skip


def options() -> argparse.ArgumentParser:
    parser = common.options(__doc__, rounds=6)
    parser.set_defaults(model="small")
    parser.add_argument("--steps", type=common.positive, default=16, help="per canvas; default 16")
    parser.add_argument("--canvases", type=common.positive, default=5, help="per measurement, the first untimed")
    parser.add_argument("--mlx-vlm", metavar="FOLDER", help="site-packages that hold mlx-vlm, searched last")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="default all")
    return parser


Moment = tuple[float, float]  # seconds on the wall and of all threads of this process


def now() -> Moment:
    return time.perf_counter(), time.process_time()


def prompt(vocab: int, length: int) -> list[int]:
    """The same random ids on every side."""
    import numpy as np

    return np.random.default_rng(1).integers(2, vocab, length).tolist()


def measure(args: argparse.Namespace, side: str) -> common.Row:
    import mlx.core as mx

    folder = common.model_folder(args.model)
    times = list({"mtplab": ours, "mlx_vlm": vlm, "transformers": reference}[side](args, folder))
    if len(times) != args.canvases or len(times) < 2:
        raise RequestError(f"{side} handed over {len(times)} canvases, not {args.canvases}; nothing is compared")
    each, cpu = ((b - a) / (len(times) - 1) * 1e3 for a, b in zip(times[0], times[-1], strict=True))
    peak = 0 if side == "transformers" else int(mx.get_peak_memory())
    return {"canvas_ms": each, "step_ms": each / args.steps, "cpu_ms": cpu / args.steps, "peak_memory_bytes": peak}


def ours(args: argparse.Namespace, folder: Path) -> Iterator[Moment]:
    from mtplab.decode.settings import Settings
    from mtplab.models.canvas import load_denoiser
    from mtplab.records.canvas import Canvas
    from mtplab.trials.canvas_arms import Session

    denoiser = load_denoiser(folder, dtype="float32")
    session = Session(denoiser, {"sampler": "entropy", "steps": args.steps, "stop": "none"})
    settings = Settings(max_tokens=args.canvases * session.policy.canvas, ignore_eos=True)
    for record in session.run(prompt(denoiser.vocab, args.prompt_tokens), request=0, settings=settings):
        if isinstance(record, Canvas):
            if record.steps != args.steps:
                raise RequestError(f"mtplab took {record.steps} steps, not {args.steps}; nothing is compared")
            # The last canvas has no commit; the others end with theirs. mlx-vlm's begin with it: the same in a row.
            yield now()


class Nothing:
    """A tokenizer and detokenizer that do nothing."""

    last_segment, text, tokens = "", "", ()

    def __init__(self) -> None:
        self.detokenizer = self.stopping_criteria = self
        self.clean_up_tokenization_spaces = False

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def vlm(args: argparse.Namespace, folder: Path) -> Iterator[Moment]:
    if args.mlx_vlm:
        sys.path.append(args.mlx_vlm)
    try:
        from mlx_vlm.generate.diffusion import stream_diffusion_generate
        from mlx_vlm.models.diffusion_gemma import Model, ModelConfig
    except ImportError as error:
        raise RequestError(f"mlx-vlm cannot be imported ({error}); name it with --mlx-vlm, or leave it out") from error
    import mlx.core as mx
    from mlx.utils import tree_map

    # Its loader adds a vision tower to a checkpoint that has none; the model itself takes one without.
    model = Model(ModelConfig.from_dict(json.loads((folder / "config.json").read_text()) | {"vision_config": None}))
    stored = {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in mx.load(str(path)).items()}
    model.load_weights(list(model.sanitize(stored).items()))
    model.eval()
    floats = tree_map(lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a, model.parameters())
    model.update(floats)
    mx.eval(model.parameters())
    # Without these keys it does not stop early; with them it would at its own thresholds.
    model.config.generation_config = {"max_new_tokens": 256, "t_min": 0.4, "t_max": 0.8}
    ids, length = prompt(model.config.text_config.vocab_size, args.prompt_tokens), model.config.canvas_length
    results = stream_diffusion_generate(
        model, Nothing(), Nothing(), mx.array([ids]), None, None, max_tokens=args.canvases * length,
        skip_special_token_ids=[], temperature=1.0, max_denoising_steps=args.steps, diffusion_full_canvas=True,
        diffusion_sampler="entropy-bound",
    )  # fmt: skip
    for result in results:
        if result.diffusion_block_complete:
            if result.diffusion_denoising_steps != args.steps * result.diffusion_canvas_index:
                raise RequestError(f"mlx-vlm took other steps than {args.steps} a canvas; nothing is compared")
            yield now()


def reference(args: argparse.Namespace, folder: Path) -> Iterator[Moment]:
    try:
        import torch
        from transformers import DiffusionGemmaForBlockDiffusion
    except ImportError as error:
        raise RequestError(f"transformers with DiffusionGemma cannot be imported ({error})") from error
    from mtplab.backend import facts

    torch.set_num_threads(int((facts().get("blas") or {}).get("threads") or 1))
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32).eval()
    times: list[Moment] = []
    streamer = SimpleNamespace(put=lambda _: times.append(now()), end=lambda: None)
    model.generate(
        torch.tensor([prompt(model.config.text_config.vocab_size, args.prompt_tokens)]),
        max_new_tokens=args.canvases * model.config.canvas_length, max_denoising_steps=args.steps, eos_token_id=None,
        # A mean entropy that no canvas falls below: never stopped early.
        confidence_threshold=1e-30, streamer=streamer,
    )  # fmt: skip
    yield from times[1:]  # the first is the prompt


def extra(args: argparse.Namespace, rounds: Sequence[common.Round]) -> dict[str, Any]:
    wanted = []
    for side, sense, limit in (("mlx_vlm", "at most", 0.9), ("transformers", None, None)):
        if {"mtplab", side} <= set(args.sides):
            wanted += [
                common.Wanted(f"mtplab / {side}, time per {what}", "mtplab", side, key, sense, limit)
                for what, key in (("step", "step_ms"), ("canvas", "canvas_ms"))
            ]
            wanted.append(common.Wanted(f"mtplab / {side}, CPU time per step", "mtplab", side, "cpu_ms"))
    ratios = [common.compare(rounds, w) for w in wanted]
    return {"sides": common.medians(rounds, "canvas_ms", "step_ms", "cpu_ms", "peak_memory_bytes"), "ratios": ratios}


def build(size: str, place: Path) -> Path:
    """A random checkpoint in DiffusionGemma's layout, for every side to read."""
    from mtplab import backend

    backend.setup()
    sys.path.insert(0, str(common.ROOT / "tests"))
    import canvas_tiny

    how = SIZES[size]
    return canvas_tiny.build(place / size, "gemma", text=how["text"], canvas_length=how["canvas"])


def main() -> int:
    parser = options()
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="mtplab-bench-"))
    try:
        if args.model in SIZES and not args.side:
            # The sides are processes with these same flags: they get the folder.
            sys.argv += ["--model", str(build(args.model, place))]
        return common.main(parser, lambda a: a.sides, measure, extra=extra)
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
