"""`mtplab probe`: which operations of this model are width-invariant on this machine."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Annotated

import typer

from mtplab.cli.options import Model, Output, Quiet, Trust, check_format, out, tell
from mtplab.errors import RequestError

MOST = 64


def probe(
    model: Model = "lab-mtp",
    widths: Annotated[str, typer.Option("--widths", help="Rows of a block: 1-16, or a comma list.")] = "1-16",
    seeds: Annotated[int, typer.Option("--seeds", help="Random inputs, each with a cache of its own length.")] = 3,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, float16 or bfloat16.")] = None,
    max_kv_size: Annotated[
        int | None, typer.Option("--max-kv-size", help="Rows of a rotating cache.", show_default=False)
    ] = None,
    kv_bits: Annotated[int | None, typer.Option("--kv-bits", help="Quantized KV cache.", show_default=False)] = None,
    simulate: Annotated[
        str | None,
        typer.Option("--simulate", help="Put simulated numerics in force, e.g. splitk@layers.1.*.", show_default=False),
    ] = None,
    trust_remote_code: Trust = False,
    output: Output = "table",
    quiet: Quiet = False,
) -> None:
    """Compare every operation of the model at each width with one row at a time, bit by bit."""
    check_format(output)
    wanted = parse_widths(widths)
    from mtplab import backend

    info = backend.setup()
    if info.notice and not quiet:
        tell(f"note: {info.notice}")
    from mtplab.backend import numerics
    from mtplab.diagnose.probe import check_seeds
    from mtplab.diagnose.probe import probe as measure
    from mtplab.models import load_target
    from mtplab.report import probe as report

    check_seeds(seeds)
    if simulate is not None:
        numerics.parse(simulate)
    options = {"dtype": dtype, "max_kv_size": max_kv_size, "kv_bits": kv_bits, "trust_remote_code": trust_remote_code}
    loaded = load_target(model, head="none", **options)
    with nullcontext() if simulate is None else numerics.simulate(loaded.target, simulate):
        told = (lambda text: None) if quiet else tell
        found = measure(loaded.target, widths=wanted, seeds=seeds, context=loaded.context, progress=told)
    out(report.render(found.to_json() | {"model": loaded.facts, "machine": backend.facts()}, output))


def parse_widths(text: str) -> list[int]:
    """ "1-4,8" -> [1, 2, 3, 4, 8]; RequestError for anything else, or a width outside of 1..64."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,3})(?:-(\d{1,3}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= MOST:
            raise RequestError(f"--widths {text!r} is not a list of widths in 1..{MOST}, as 1-16 or 1,2,4,8")
        found.update(range(first, last + 1))
    return sorted(found)
