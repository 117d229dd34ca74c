"""`mtplab diverge`: where an arm leaves the one-token baseline, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtplab.cli.options import (
    HeadNorms,
    Hidden,
    History,
    Model,
    Output,
    Prime,
    Quiet,
    Recursion,
    Trust,
    check_format,
    out,
    tell,
)
from mtplab.errors import RequestError


def diverge(
    model: Model = "lab-mtp",
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="One prompt.", show_default=False)] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option("--corpus", help="Bundled text or a .txt/.jsonl file; repeatable [novel, c].", show_default=False),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            help="depth0..8, adaptive, ngram1..8, scripted1..8; repeatable or a comma list "
            "[depth0..3, adaptive, scripted3; without a head depth0, ngram3, scripted3].",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", help="Prompts per corpus [4].", show_default=False)
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", help="Tokens cut per prompt [96].", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", help="Tokens compared per prompt.")] = 256,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Go on after the end of text.")
    ] = True,
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
    recursion: Recursion = None,
    hidden: Hidden = None,
    head_norms: HeadNorms = None,
    trust_remote_code: Trust = False,
    simulate: Annotated[
        str | None,
        typer.Option("--simulate", help="Simulated numerics, e.g. splitk@layers.3.mlp.*", show_default=False),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain/--no-explain", help="Look for the modules that make the difference.")
    ] = True,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for diverge.json and page.html [none].", show_default=False)
    ] = None,
    output: Output = "table",
    quiet: Quiet = False,
) -> None:
    """Compare arms with the one-token baseline and say why one leaves it: rounding, or a fault."""
    check_format(output)
    if kv_group_size is not None and kv_bits is None:
        raise RequestError("--kv-group-size is for a quantized cache; give --kv-bits, too, or drop it")
    from mtplab import backend

    info = backend.setup()
    if info.notice:
        tell(f"note: {info.notice}")
    from mtplab.report import divergence
    from mtplab.trials.diverging import Wanted, arm_names
    from mtplab.trials.diverging import diverge as run

    load = {
        "max_kv_size": max_kv_size, "kv_bits": kv_bits, "kv_group_size": kv_group_size or 64, "dtype": dtype,
        "recursion": recursion, "hidden": hidden, "head_norms": head_norms, "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    wanted = Wanted(
        model, arm_names(arm or ()), tuple(corpus or ()), prompt, prompts, prompt_tokens, max_tokens,
        prefill_step_size, ignore_eos, history, prime, simulate, explain, load,
    )  # fmt: skip
    found = run(wanted, (lambda text: None) if quiet else tell)
    out(divergence.render(found, output))
    if folder is not None:
        path = divergence.write(found, folder)
        if not quiet:
            tell(f"page: {path}")
