"""`mtplab denoise`: step counts and samplers of a canvas model compared, or (with a prompt) one text, streaming."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mtplab.cli.generate import check_colour, encode, read_prompt, show_record
from mtplab.cli.options import Output, Quiet, check_format, out, tell
from mtplab.cli.sweep import RUNS, _names, _option, _stamp
from mtplab.errors import RequestError, TrialsFailed


def denoise(
    prompt: Annotated[
        str | None, _option("-p", "--prompt", help="Decode this one prompt; - reads it from stdin.")
    ] = None,
    file: Annotated[Path | None, _option("--file", help="A file with the one prompt.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Draw the canvas as it resolves (on a terminal).")] = False,
    color: Annotated[
        str | None, _option("--color", help="With --show: auto (on a terminal), always or never [auto].")
    ] = None,
    stop_text: Annotated[
        list[str] | None, _option("--stop-text", help="One prompt: end before this text; repeatable.")
    ] = None,
    model: Annotated[
        str | None, _option("--model", help="Bundled name, checkpoint folder or hub id [lab-canvas].")
    ] = None,
    corpus: Annotated[
        list[str] | None, _option("--corpus", help="Bundled text or a .txt/.jsonl file; repeatable [novel, c].")
    ] = None,
    steps: Annotated[
        str | None, _option("--steps", help="Comma list; with a prompt one number [4,8,16,32,48].")
    ] = None,
    sampler: Annotated[
        str | None,
        _option("--sampler", help="Comma list: entropy, argmax, confidence, count; also entropy:0.2 [the model's]."),
    ] = None,
    threshold: Annotated[
        str | None, _option("--threshold", help="Comma list: every --sampler with each of these thresholds.")
    ] = None,
    canvas: Annotated[str | None, _option("--canvas", help="Comma list of canvas lengths [the model's].")] = None,
    seeds: Annotated[int | None, _option("--seeds", help="Seeds per prompt; 2 make a noise floor [2].")] = None,
    seed: Annotated[int | None, _option("--seed", help="The first seed [0].")] = None,
    prompts: Annotated[int | None, _option("--prompts", help="Prompts per corpus [8].")] = None,
    prompt_tokens: Annotated[int | None, _option("--prompt-tokens", help="Tokens cut per prompt [64].")] = None,
    max_tokens: Annotated[
        int | None, _option("--max-tokens", "-m", help="Tokens made per prompt [the model's, else 64].")
    ] = None,
    ignore_eos: Annotated[
        bool | None, _option("--ignore-eos/--no-ignore-eos", help="Go on after the end of text [off].")
    ] = None,
    scorer: Annotated[
        str | None, _option("--scorer", help="encoder (the model's causal pass) or an autoregressive model [encoder].")
    ] = None,
    schedule: Annotated[str | None, _option("--schedule", help="Temperature: linear or constant.")] = None,
    t_max: Annotated[float | None, _option("--t-max", help="Temperature of the first step.")] = None,
    t_min: Annotated[float | None, _option("--t-min", help="Where a linear schedule goes.")] = None,
    proposal: Annotated[str | None, _option("--proposal", help="sampled or argmax [the sampler's].")] = None,
    renoise: Annotated[str | None, _option("--renoise", help="uniform, mask or none.")] = None,
    stop: Annotated[
        str | None, _option("--stop", help="A canvas stops when: stable, accepted or none (every step runs).")
    ] = None,
    stability: Annotated[int | None, _option("--stability", help="stable: so many more equal steps.")] = None,
    confidence: Annotated[float | None, _option("--confidence", help="stable: mean entropy below this.")] = None,
    finalise: Annotated[str | None, _option("--finalise", help="Commit: argmax, or kept (accepted) tokens.")] = None,
    prefill_step_size: Annotated[int | None, _option("--prefill-step-size", help="Prompt tokens per pass.")] = None,
    dtype: Annotated[str | None, _option("--dtype", help="float32, float16 or bfloat16.")] = None,
    plan: Annotated[Path | None, _option("--plan", help="A TOML file with these settings; flags win over it.")] = None,
    folder: Annotated[Path | None, _option("--out", help="Run folder [runs/TIME-MODEL].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    output: Output = "table",
    quiet: Quiet = False,
) -> None:
    """Compare step counts and samplers of a canvas model on the same prompts and starting canvases."""
    check_format(output)
    policy = {
        "schedule": schedule, "t_max": t_max, "t_min": t_min, "proposal": proposal, "renoise": renoise, "stop": stop,
        "stability": stability, "confidence": confidence, "finalise": finalise,
    }  # fmt: skip
    common = {
        "model": model, "steps": _numbers("--steps", steps), "samplers": _samplers(sampler, threshold),
        "canvases": _numbers("--canvas", canvas), "seed": seed, "max_tokens": max_tokens, "ignore_eos": ignore_eos,
        "prefill_step_size": prefill_step_size, "dtype": dtype,
    }  # fmt: skip
    many = {
        "corpora": corpus or None, "seeds": seeds, "prompts": prompts, "prompt_tokens": prompt_tokens,
        "scorer": scorer,
    }  # fmt: skip
    if prompt is not None or file is not None:
        _refuse_flags(many | {"plan": plan, "out": folder, "resume": resume or None})
        one = {"chat": chat, "show": show, "color": color, "stop": tuple(stop_text or ()), "quiet": quiet}
        single(read_prompt(prompt, file), common, policy, output, **one)
        return
    for flag, value in (("--show", show), ("--color", color), ("--chat", chat), ("--stop-text", stop_text)):
        if value:
            raise RequestError(f"{flag} is for one prompt; give --prompt or --file, too")
    asked = common | many | policy
    store = _resumed(folder, plan, asked) if resume else start(_planned(plan, asked), folder, quiet=quiet)
    finish(store, output, quiet=quiet)


def _refuse_flags(given: dict[str, Any]) -> None:
    for key, value in given.items():
        if value is not None:
            name = {"corpora": "corpus"}.get(key, key).replace("_", "-")
            raise RequestError(f"--{name} is for comparing over many prompts; drop it, or --prompt and --file")


def _numbers(flag: str, text: str | None) -> list[int] | None:
    names = _names(text)
    if names is None:
        return None
    bad = next((n for n in names if not n.removeprefix("-").isdecimal()), None)
    if bad is not None or not names:
        raise RequestError(f"{flag} {text!r} is not a comma list of whole numbers")
    return [int(n) for n in names]


def _samplers(text: str | None, thresholds: str | None) -> list[str] | None:
    names = _names(text)
    if names == [] or (thresholds is not None and not _names(thresholds)):
        raise RequestError("--sampler and --threshold need at least one value")
    if thresholds is None:
        return names
    if not names:
        raise RequestError("--threshold needs --sampler: which sampler is it a threshold of?")
    if any(":" in n for n in names):
        raise RequestError(f"--sampler {text} has a threshold of its own; drop it, or --threshold")
    return [f"{n}:{t}" for n in names for t in _names(thresholds)]


# One prompt --------------------------------------------------------------------------------------------------------


def single(
    text: str,
    common: dict[str, Any],
    policy: dict[str, Any],
    output: str,
    *,
    chat: bool,
    show: bool,
    color: str | None,
    stop: tuple[str, ...],
    quiet: bool,
) -> None:
    """Decode one prompt; the text goes to stdout canvas by canvas, the drawing and the statistics to stderr."""
    check_format(output, ("table", "json", "jsonl"))
    _check_drawing(show, color, quiet, output)
    if not all(stop):
        raise RequestError("--stop-text is empty and would end every text before it begins; leave it out")
    say = _silent if quiet else tell
    asked = policy | {k: _one(f, common[key]) for k, f, key in ONE}
    from mtplab import backend

    info = backend.setup()
    if info.notice:
        say(f"note: {info.notice}")
    from mtplab.decode.settings import Settings
    from mtplab.models.canvas import load_denoiser
    from mtplab.trials.canvas_arms import Session

    asked_for = {
        "max_tokens": common["max_tokens"],
        "prefill_step": common["prefill_step_size"],
        "seed": common["seed"],
    }
    wanted = {k: v for k, v in asked_for.items() if v is not None}
    settings = Settings(**wanted, stop=stop, ignore_eos=bool(common["ignore_eos"]))
    denoiser = load_denoiser(common["model"] or "lab-canvas", dtype=common["dtype"])
    session = Session(denoiser, asked, max_tokens=common["max_tokens"])
    settings = replace(settings, max_tokens=session.max_tokens)
    tokens = encode(session.denoiser.tokenizer, text, chat)
    from mtplab.report.canvas_stream import effective_line

    say(effective_line(session.effective))
    stream(session, tokens, settings, output, drawing=show and _draws(color or "auto"), say=say)


ONE = (("steps", "--steps", "steps"), ("sampler", "--sampler", "samplers"), ("canvas", "--canvas", "canvases"))


def _one(flag: str, values: list[Any] | None) -> Any:
    if values is not None and len(values) != 1:
        raise RequestError(f"{flag} has {len(values)} values, but one prompt is decoded one way; give one value")
    return None if values is None else values[0]


def _check_drawing(show: bool, color: str | None, quiet: bool, output: str) -> None:
    check_colour(color, show)
    if show and quiet:
        raise RequestError("--show draws on stderr and --quiet wants nothing there; drop one of them")
    if show and output == "jsonl" and _one_terminal():
        raise RequestError("--show and -o jsonl would write over each other here; send one of them to a file")


def _silent(text: str) -> None:
    """`tell` of a quiet request: errors alone reach stderr."""


def _one_terminal() -> bool:
    """Whether text and drawing meet on one."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def _draws(choice: str) -> bool:
    if choice != "auto":
        return choice == "always"
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def stream(
    session: Any, tokens: list[int], settings: Any, output: str, *, drawing: bool, say: Callable[[str], None] = tell
) -> None:
    """Decode and show; Ctrl-C ends the text, not the statistics, which go to `say`."""
    from mtplab.report.canvas_stream import CanvasPainter, Drawing

    tokenizer = session.denoiser.tokenizer
    painter = CanvasPainter(tokenizer.stream(), stop=settings.stop, safe=sys.stdout.isatty())
    above = output == "table" and _one_terminal()  # a document comes last
    canvas = Drawing(tokenizer.decode, before=lambda: painter.text if above else "") if drawing else None
    records: list[Any] = []
    with suppress(KeyboardInterrupt):
        for record in session.run(tokens, request=0, settings=settings):
            records.append(record)
            if canvas is not None:
                sys.stderr.write(canvas.frame(record) if hasattr(record, "held") else canvas.wipe())
                sys.stderr.flush()
            show_record(record, painter.feed(record), output)
    if canvas is not None:
        sys.stderr.write(canvas.wipe())
        sys.stderr.flush()
    if records:
        say(_end(session, records, painter.text, settings, output))
    if not records or not getattr(records[-1], "cut", None):
        raise KeyboardInterrupt


def _end(session: Any, records: list[Any], text: str, settings: Any, output: str) -> str:
    """Write the end of the line or the document; returns the statistics line."""
    from mtplab.report.canvas_stream import statistics, statistics_line
    from mtplab.trials.canvas_arms import collect
    from mtplab.trials.files import dumps

    request = collect(records, session.settings(settings))
    if output == "table" and not text.endswith("\n"):
        out("\n")
    if output == "json":
        numbers, compact = statistics(request), request.compact().to_json()
        document = {"schema": 1, "text": text, "tokens": request.tokens, "statistics": numbers}
        document |= {"settings": request.settings, "canvases": compact["canvases"], "steps": compact["steps"]}
        out(dumps(document) + "\n")
    return statistics_line(request)


# Many prompts --------------------------------------------------------------------------------------------------------


def _planned(path: Path | None, asked: dict[str, Any]) -> Any:
    from mtplab.trials import canvas_plan
    from mtplab.trials.plan import load_plan

    plan = load_plan(path, canvas_plan.DenoisePlan) if path else canvas_plan.DenoisePlan()
    return canvas_plan.change(plan, asked)


def _resumed(folder: Path | None, path: Path | None, asked: dict[str, Any]) -> Any:
    """The run to go on with. Flags may repeat the stored plan but not change it."""
    from mtplab.trials import canvas_plan, store
    from mtplab.trials.plan import load_plan

    if folder is None:
        raise RequestError("--resume needs --out, the folder of the run to go on with")
    stored = store.open_run(folder, kind="denoise").plan
    wanted = canvas_plan.change(load_plan(path, canvas_plan.DenoisePlan) if path else stored, asked)
    return store.open_run(folder, wanted)


def start(plan: Any, folder: Path | None, *, quiet: bool, name: str = "") -> Any:
    """Check everything and create the run folder."""
    from mtplab.trials import runner
    from mtplab.trials.canvas_worker import COMMAND
    from mtplab.trials.progress import Progress

    folder = folder or RUNS / _stamp(name or Path(plan.model).name)
    return runner.start(folder, plan, Progress(quiet=quiet), command=COMMAND)


def finish(store: Any, output: str, *, quiet: bool = False, show: Callable[[str], Any] = out) -> None:
    """Run what is open, print the result (`show`), write the page; TrialsFailed where some trials have no result."""
    from mtplab.report import canvas_page
    from mtplab.report.canvas_results import load_results, rendered
    from mtplab.trials import runner
    from mtplab.trials.canvas_worker import COMMAND
    from mtplab.trials.plan import order
    from mtplab.trials.progress import Progress

    failed = runner.run(store, Progress(quiet=quiet), command=COMMAND)
    results = load_results(store.folder)
    show(rendered(results, output))
    path = canvas_page.write(results)
    if not quiet:
        tell(f"page: {path}")
    if failed:
        raise TrialsFailed(
            f"{failed} of {len(order(store.plan))} trials failed, the rest are stored; "
            f"try those again with: {runner.resume_command(store.folder, store.plan.kind)}"
        )
