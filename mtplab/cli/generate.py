"""`mtplab generate`: one prompt through any arm, streaming, with a statistics line at the end."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from mtplab.cli.options import (
    AssistantFolder,
    Drafts,
    Head,
    HeadNorms,
    Hidden,
    History,
    Model,
    Prime,
    Recursion,
    Trust,
    Verify,
    check_format,
    out,
    tell,
)
from mtplab.errors import RequestError

COLOURS = ("auto", "always", "never")


def generate(
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="The prompt; - reads it from stdin.", show_default=False)
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A file with the prompt.", show_default=False)] = None,
    model: Model = "lab-mtp",
    arm: Annotated[
        str | None,
        typer.Option("--arm", help="baseline, depth0..8, adaptive, ngram1..8 [adaptive, or baseline without a head]."),
    ] = None,
    depth: Annotated[int | None, typer.Option("--depth", help="Short for --arm depthN.", show_default=False)] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", help="Tokens at most.")] = 100,
    temp: Annotated[float, typer.Option("--temp", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="0 is off.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="0 is off.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of the sampling.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of text.")] = False,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text; repeatable.", show_default=False)
    ] = None,
    prefill_step_size: Annotated[
        int, typer.Option("--prefill-step-size", help="Prompt tokens per prefill pass.")
    ] = 2048,
    max_kv_size: Annotated[
        int | None, typer.Option("--max-kv-size", help="Rows of a rotating cache.", show_default=False)
    ] = None,
    kv_bits: Annotated[int | None, typer.Option("--kv-bits", help="Quantized KV cache.", show_default=False)] = None,
    kv_group_size: Annotated[
        int | None, typer.Option("--kv-group-size", help="Group of the quantized cache [64].", show_default=False)
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, float16 or bfloat16.")] = None,
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
    show: Annotated[bool, typer.Option("--show", help="Colour accepted drafts, bonus tokens and corrections.")] = False,
    color: Annotated[
        str | None,
        typer.Option("--color", help="With --show: auto (a terminal), always or never [auto].", show_default=False),
    ] = None,
    output: Annotated[
        str, typer.Option("-o", "--output", help="table (the text), json, or jsonl (every record as it comes).")
    ] = "table",
) -> None:
    """Generate text; the result goes to stdout, the statistics line to stderr."""
    check_format(output, ("table", "json", "jsonl"))
    check_colour(color, show)
    if arm is not None and depth is not None:
        raise RequestError(f"--arm {arm} and --depth {depth} say the same thing; give one of them")
    if kv_group_size is not None and kv_bits is None:
        raise RequestError("--kv-group-size is for a quantized cache; give --kv-bits, too, or drop it")
    text = read_prompt(prompt, file)
    name = f"depth{depth}" if depth is not None else arm
    from mtplab import backend

    info = backend.setup()
    if info.notice:
        tell(f"note: {info.notice}")
    from mtplab.decode.settings import Settings, check_verify

    way = check_verify(verify or "batched")
    settings = Settings(
        max_tokens=max_tokens, temp=temp, top_p=top_p, top_k=top_k, seed=seed, ignore_eos=ignore_eos,
        stop=tuple(stop or ()), prefill_step=prefill_step_size,
    )  # fmt: skip
    wanted = {
        "max_kv_size": max_kv_size, "kv_bits": kv_bits, "kv_group_size": kv_group_size or 64, "dtype": dtype,
        "head_folder": head, "recursion": recursion, "hidden": hidden, "head_norms": head_norms,
        "assistant": assistant,
        "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    asked = {"history": history, "prime": prime, "drafts": drafts}
    drafting = {k: v for k, v in asked.items() if v is not None}
    session = open_session(model, name, wanted, drafting, sampled=not settings.greedy, verify=way)
    if verify is not None:
        tell(f"verify {way}: logits equal to {session.verifier.equal_to}")
    tokens = encode(session.loaded.tokenizer, text, chat)
    colour = show and output == "table" and wants_colour(color or "auto")
    stream(session, tokens, settings, output, colour=colour)


def check_colour(color: str | None, show: bool) -> None:
    """RequestError for no such choice, or one that nothing would use."""
    if color is not None and color not in COLOURS:
        raise RequestError(f"--color {color!r} is not one of {', '.join(COLOURS)}")
    if color is not None and not show:
        raise RequestError(f"--color {color} says how --show draws; give --show, too, or drop it")


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the flag, a file or stdin; an empty one is an error."""
    if prompt is not None and file is not None:
        raise RequestError("--prompt and --file both give a prompt; use one of them")
    from mtplab.trials.corpus import check_utf8, read_text

    if file is not None:
        text = read_text(file, str(file), "file")
    elif prompt is None and sys.stdin.isatty():
        raise RequestError("no prompt; give one with --prompt, --file or on stdin")
    else:
        text = _stdin() if prompt in (None, "-") else prompt
    check_utf8(text)
    if not text:
        raise RequestError("the prompt is empty; give at least one token")
    return text


def _stdin() -> str:
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt on stdin is not UTF-8 (byte offset {error.start})") from None


def open_session(
    model: str, name: str | None, wanted: dict[str, Any], drafting: dict[str, Any], *, sampled: bool, **session: Any
) -> Any:
    """Load the model with or without its head, as the arm needs it. An unknown arm is refused before loading, as are
    options of drafting that the arm would not use."""
    from mtplab.decode.settings import check_drafting
    from mtplab.models import load_target
    from mtplab.trials.arms import Session, parse_arm

    arm = parse_arm(name) if name is not None else None
    uses = {"assistant": wanted["assistant"] is not None, "sampled": sampled}
    check_drafting(drafting, head=arm is None or arm.needs_head, **uses)
    head = "auto" if arm is None else "require" if arm.needs_head else "none"
    loaded = load_target(model, head=head, **wanted)
    arm = arm or parse_arm("adaptive" if loaded.head is not None else "baseline")
    check_drafting(drafting, head=arm.needs_head, **uses)
    return Session(loaded, arm, **drafting, **session)


def encode(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Token ids of the prompt; a text without any token is an error."""
    tokens = tokenizer.chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    if not tokens:
        raise RequestError("the prompt is empty; give at least one token")
    return tokens


def wants_colour(choice: str) -> bool:
    """Colours on a terminal that has not declined them (NO_COLOR), or where they are forced."""
    if choice != "auto":
        return choice == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def stream(session: Any, tokens: list[int], settings: Any, output: str, *, colour: bool) -> None:
    """Decode, show the text as it comes, end with the statistics; Ctrl-C ends the text, not the statistics."""
    from mtplab.report import stream as shown

    # A terminal must not be steered by what a model says; a file gets the text as it is.
    painter = shown.Painter(
        session.loaded.tokenizer.stream(), stop=settings.stop, colour=colour, safe=sys.stdout.isatty()
    )
    if colour:
        tell(shown.legend())
    records: list[Any] = []
    with suppress(KeyboardInterrupt):
        for record in session.run(tokens, request=0, settings=settings):
            records.append(record)
            show_record(record, painter.feed(record), output)
    if records:
        _finish(records, painter.text, session.settings(settings), output)
    if not records or not records[-1].cut:
        raise KeyboardInterrupt


def show_record(record: Any, text: str, output: str) -> None:
    """One record as it comes: its text, or its JSON line."""
    from dataclasses import asdict

    from mtplab.trials.files import dumps

    if output == "table" and text:
        out(text)
    elif output == "jsonl":
        out(dumps({"record": type(record).__name__.lower(), "text": text, **asdict(record)}) + "\n")


def _finish(records: list[Any], text: str, effective: dict[str, Any], output: str) -> None:
    """The end of the line or the document, and the statistics."""
    from mtplab.records.types import Request
    from mtplab.report.stream import statistics, statistics_line
    from mtplab.trials.files import dumps

    request = Request("0", "", records[0], tuple(records[1:]), records[-1].cut or "interrupt", effective)
    if output == "table" and not text.endswith("\n"):
        out("\n")
    if output == "json":
        numbers = statistics(request)
        document = {"schema": 1, "text": text, "tokens": request.tokens, "statistics": numbers, "settings": effective}
        out(dumps(document) + "\n")
    tell(statistics_line(request))
