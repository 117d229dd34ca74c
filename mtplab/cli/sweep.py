"""`mtplab sweep`: depth x corpus x rounds against the baseline."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtplab.cli.options import (
    AssistantFolder,
    Drafts,
    Head,
    HeadNorms,
    Hidden,
    History,
    Output,
    Prime,
    Quiet,
    Recursion,
    Trust,
    Verify,
    check_format,
    out,
    tell,
)
from mtplab.errors import RequestError, TrialsFailed

if TYPE_CHECKING:
    from mtplab.trials.plan import Plan

RUNS = Path("runs")


def _option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


def sweep(
    model: Annotated[
        str | None, _option("--model", help="Bundled name, checkpoint folder or hub id [lab-mtp].")
    ] = None,
    corpus: Annotated[
        list[str] | None, _option("--corpus", help="Bundled text or a .txt/.jsonl file; repeatable [novel, c].")
    ] = None,
    arms: Annotated[
        str | None, _option("--arms", help="Comma list: baseline, depth0..8, adaptive, ngram1..8 [baseline..adaptive].")
    ] = None,
    rounds: Annotated[int | None, _option("--rounds", help="Every round runs every arm once [5].")] = None,
    prompts: Annotated[int | None, _option("--prompts", help="Prompts per corpus [8].")] = None,
    prompt_tokens: Annotated[int | None, _option("--prompt-tokens", help="Tokens cut per prompt [128].")] = None,
    max_tokens: Annotated[int | None, _option("--max-tokens", "-m", help="Tokens made per prompt [128].")] = None,
    modes: Annotated[str | None, _option("--modes", help="Comma list of greedy, sampled [both].")] = None,
    temp: Annotated[float | None, _option("--temp", help="Temperature of the sampled mode [0.8].")] = None,
    top_p: Annotated[float | None, _option("--top-p", help="Of the sampled mode; 0 is off [0].")] = None,
    top_k: Annotated[int | None, _option("--top-k", help="Of the sampled mode; 0 is off [0].")] = None,
    seed: Annotated[int | None, _option("--seed", help="Of the sampled mode and of the trials' order [0].")] = None,
    ignore_eos: Annotated[
        bool | None, _option("--ignore-eos/--no-ignore-eos", help="Go on after the end of text [on].")
    ] = None,
    prefill_step_size: Annotated[
        int | None, _option("--prefill-step-size", help="Prompt tokens per prefill pass [2048].")
    ] = None,
    max_kv_size: Annotated[int | None, _option("--max-kv-size", help="Rows of a rotating cache [none].")] = None,
    kv_bits: Annotated[int | None, _option("--kv-bits", help="Quantized KV cache [none].")] = None,
    kv_group_size: Annotated[int | None, _option("--kv-group-size", help="Group of the quantized cache [64].")] = None,
    dtype: Annotated[
        str | None, _option("--dtype", help="float32, float16 or bfloat16 [as stored; CPU: float32].")
    ] = None,
    history: History = None,
    prime: Prime = None,
    drafts: Drafts = None,
    head: Head = None,
    recursion: Recursion = None,
    hidden: Hidden = None,
    head_norms: HeadNorms = None,
    assistant: AssistantFolder = None,
    verify: Verify = None,
    trust_remote_code: Trust = False,
    plan: Annotated[Path | None, _option("--plan", help="A TOML file with these settings; flags win over it.")] = None,
    folder: Annotated[Path | None, _option("--out", help="Run folder [runs/TIME-MODEL].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    dialect: Annotated[
        str | None, _option("--dialect", help="The counts in words of vllm, sglang, omlx, llamacpp, gptfast or mlxlm.")
    ] = None,
    output: Output = "table",
    quiet: Quiet = False,
) -> None:
    """Run arms x corpora x rounds against the one-token-at-a-time baseline and print what pays."""
    check_format(output)
    _check_dialect(dialect)
    asked = {
        "model": model, "corpora": corpus or None, "arms": _names(arms), "rounds": rounds, "prompts": prompts,
        "prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "modes": _names(modes), "temp": temp, "top_p": top_p,
        "top_k": top_k, "seed": seed, "ignore_eos": ignore_eos, "prefill_step_size": prefill_step_size,
        "max_kv_size": max_kv_size, "kv_bits": kv_bits, "kv_group_size": kv_group_size, "dtype": dtype,
        "history": history, "prime": prime, "drafts": drafts,
        "head_folder": head, "recursion": recursion, "hidden": hidden, "head_norms": head_norms,
        "assistant": assistant, "verify": verify,
        "trust_remote_code": trust_remote_code or None,
    }  # fmt: skip
    store = _resumed(folder, plan, asked) if resume else start(_planned(plan, asked), folder, quiet=quiet)
    finish(store, output, dialect=dialect, quiet=quiet)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [x.strip() for x in text.split(",") if x.strip()]


def _check_dialect(dialect: str | None) -> None:
    if dialect is not None:
        from mtplab.records.dialects import translate

        translate([], dialect)


def _planned(path: Path | None, asked: dict[str, Any]) -> Plan:
    from mtplab.trials import plan as plans

    return plans.change(plans.load_plan(path) if path else plans.Plan(), asked)


def _resumed(folder: Path | None, path: Path | None, asked: dict[str, Any]) -> Any:
    """The run to go on with. Flags may repeat the stored plan but not change it."""
    from mtplab.trials import plan as plans
    from mtplab.trials import store

    if folder is None:
        raise RequestError("--resume needs --out, the folder of the run to go on with")
    stored = store.open_run(folder, kind="sweep").plan
    wanted = plans.change(plans.load_plan(path) if path else stored, asked)
    return store.open_run(folder, wanted)


def start(plan: Plan, folder: Path | None, *, quiet: bool, name: str = "") -> Any:
    """Check everything and create the run folder."""
    from mtplab.trials import runner
    from mtplab.trials.progress import Progress

    folder = folder or RUNS / _stamp(name or Path(plan.model).name)
    return runner.start(folder, plan, Progress(quiet=quiet))


def _stamp(name: str) -> str:
    return time.strftime("%Y%m%d-%H%M%S-") + (re.sub(r"[^\w.-]+", "_", name) or "model")


def finish(
    store: Any, output: str, *, dialect: str | None = None, quiet: bool = False, show: Callable[[str], Any] = out
) -> None:
    """Run what is open, print the result (`show`), write the page; TrialsFailed where some trials have no result."""
    from mtplab.report import page, render
    from mtplab.report.results import load_results
    from mtplab.trials import runner
    from mtplab.trials.plan import order
    from mtplab.trials.progress import Progress

    failed = runner.run(store, Progress(quiet=quiet))
    results = load_results(store.folder)
    show(render.sweep(results, output, dialect=dialect))
    path = page.write(results)
    if not quiet:
        tell(f"page: {path}")
    if failed:
        raise TrialsFailed(
            f"{failed} of {len(order(store.plan))} trials failed, the rest are stored; "
            f"try those again with: {runner.resume_command(store.folder)}"
        )
