"""`mtplab head train`: an MTP head for a model that has none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mtplab.cli.options import Output, Quiet, check_format, out, tell
from mtplab.errors import RequestError


def _option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


def train(
    folder: Annotated[Path, _option("--out", help="Run folder: rows, state, learning curve, head.")],
    model: Annotated[str | None, _option("--model", help="Bundled name, checkpoint folder or hub id.")] = None,
    corpus: Annotated[
        list[str] | None, _option("--corpus", help="A .txt/.jsonl file (or bundled text) to begin from; repeatable.")
    ] = None,
    minutes: Annotated[float | None, _option("--minutes", help="Train for so long (without the collecting).")] = None,
    steps: Annotated[int | None, _option("--steps", help="Or for so many steps.")] = None,
    rows: Annotated[int | None, _option("--rows", help="Rows to collect from the model [1024].")] = None,
    length: Annotated[int | None, _option("--length", help="Tokens of a row [256].")] = None,
    prompt_tokens: Annotated[
        int | None, _option("--prompt-tokens", help="Tokens of a row that a text gives [64].")
    ] = None,
    temp: Annotated[float | None, _option("--temp", help="Of half of the continuations [0.8].")] = None,
    depth: Annotated[int | None, _option("--depth", help="How deep the head is chained [3].")] = None,
    batch: Annotated[int | None, _option("--batch", help="Rows of a training step [8].")] = None,
    gather: Annotated[int | None, _option("--gather", help="Rows generated together [48].")] = None,
    lr: Annotated[float | None, _option("--lr", help="Learning rate of the matrices [0.02].")] = None,
    ffn: Annotated[int | None, _option("--ffn", help="Width of the head's MLP [the trunk's].")] = None,
    candidates: Annotated[
        int | None, _option("--candidates", help="Random ids in the loss; 0: the whole vocabulary [1024].")
    ] = None,
    seed: Annotated[int | None, _option("--seed", help="Of texts, continuations and batches [0].")] = None,
    dtype: Annotated[
        str | None, _option("--dtype", help="Of the trunk: float32, float16 or bfloat16 [as stored; CPU: float32].")
    ] = None,
    collect: Annotated[bool, typer.Option("--collect", help="Collect the rows and stop there.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    output: Output = "table",
    quiet: Quiet = False,
) -> None:
    """Train an MTP head on a model's own continuations of texts; the trunk stays as it is."""
    check_format(output)
    asked = {
        "model": model, "corpora": tuple(corpus) if corpus else None, "minutes": minutes, "steps": steps,
        "rows": rows, "length": length, "prompt_tokens": prompt_tokens, "temp": temp, "depth": depth, "batch": batch,
        "gather": gather, "lr": lr, "ffn": ffn, "candidates": candidates, "seed": seed, "dtype": dtype,
    }  # fmt: skip
    if model is not None and Path(model).is_dir():
        asked["model"] = str(Path(model).resolve())
    from mtplab.train import plan as plans

    if resume:
        plan = plans.open_plan(folder, asked)
    elif model is None:
        raise RequestError("--model is missing: the checkpoint that a head is wanted for")
    else:
        plan = plans.HeadPlan(**{k: v for k, v in asked.items() if v is not None})
    from mtplab import backend

    info = backend.setup()
    if info.notice:
        tell(f"note: {info.notice}")
    from mtplab.report.curve import render
    from mtplab.train.run import train as run
    from mtplab.trials.progress import Progress

    made = run(folder, plan, Progress(quiet=quiet), resume=resume, only_collect=collect)
    out(render(made, output))
    if made["head"] and not quiet:
        tell(f"head: {made['head']}")
