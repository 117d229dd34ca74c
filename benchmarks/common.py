"""Ratios that two processes produce and one noisy machine cannot fake.

A difference of 1 % is below what a shared machine does to a single run: its clock, its neighbours and where the
memory of a process happened to land all move a time by more. So

- each side runs in a FRESH process, from the start of the interpreter to the last token: no side inherits the caches,
  the warmed allocator or the imports of another;
- the sides take turns: round r runs them in a shuffled order, round r + 1 in the reverse of it (A B B A), so that a
  steady drift falls on both alike;
- a ratio is taken WITHIN a round and its median over the rounds is reported, with a bootstrap interval over rounds;
- a round in which any side failed is left out as a whole and listed: half a round would compare unequal times.

A script calls `main(...)`. Without `--side` that runs the rounds; with `--side NAME` it is one of the fresh processes
and measures that side alone. Stdout: a table, and one JSON document as the last line. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a checkout is measured without installing it

import numpy as np  # noqa: E402
import output  # noqa: E402

from mtplab.backend import machine  # noqa: E402
from mtplab.errors import MtplabError, RequestError, TrialsFailed  # noqa: E402

SCHEMA = 1
RESAMPLES, SEED, LEVEL = 2_000, 20_260_101, 0.95
FEW_ROUNDS = 5
BUSY = 0.25  # of all cores, by the load average before the start

SENSES: dict[str, Callable[[float, float], bool]] = {
    "at least": lambda x, limit: x >= limit,
    "at most": lambda x, limit: x <= limit,
    "within": lambda x, limit: abs(x - 1) <= limit,
}

Row = dict[str, Any]  # what one side reported in one round
Round = dict[str, Row]  # side -> its row


@dataclass(frozen=True, slots=True)
class Wanted:
    """A ratio of `key`: `over` divided by `under`, wanted `sense` (of SENSES) `limit`; None: reported."""

    name: str
    over: str
    under: str
    key: str
    sense: str | None = None
    limit: float | None = None


Measure = Callable[[argparse.Namespace, str], Row]
Extra = Callable[[argparse.Namespace, Sequence[Round]], dict[str, Any]]


def options(doc: str | None, *, rounds: int = 8, prompts: int = 4, max_tokens: int = 192) -> argparse.ArgumentParser:
    """The flags every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab-mtp", help="a bundled model or a checkpoint folder (default: lab-mtp)")
    parser.add_argument("--rounds", type=positive, default=rounds, help=f"default {rounds}")
    parser.add_argument("--prompts", type=positive, default=prompts, help=f"of the corpus; default {prompts}")
    parser.add_argument("--prompt-tokens", type=positive, default=64, help="default 64")
    parser.add_argument("--max-tokens", type=positive, default=max_tokens, help=f"per prompt; default {max_tokens}")
    parser.add_argument("--corpus", default="c", help="a bundled corpus: c or novel (default c)")
    parser.add_argument("--timeout", type=positive, default=1800, help="seconds for one process; default 1800")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def main(
    parser: argparse.ArgumentParser,
    sides: Sequence[str] | Callable[[argparse.Namespace], Sequence[str]],
    measure: Measure,
    ratios: Sequence[Wanted] = (),
    extra: Extra | None = None,
) -> int:
    """Run one side (`--side`) or all rounds; returns the exit code (0, 2, 3, or 4 when rounds were left out)."""
    args = parser.parse_args()
    try:
        if args.side:
            print(json.dumps(_measured(args, measure), allow_nan=False))
            return 0
        names = sides(args) if callable(sides) else sides
        return _all_rounds(parser.prog, args, list(names), list(ratios), extra)
    except MtplabError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.code


# One side, in its own process --------------------------------------------------------------------------------------


def _measured(args: argparse.Namespace, measure: Measure) -> Row:
    """Set the backend up as every side does, measure, and say what it ran on and who else was running."""
    from mtplab import backend

    backend.setup()
    with backend.LoadSampler() as sampler:
        row = measure(args, args.side)
    return row | {"machine": backend.facts(), "load": sampler.summary()}


def model_folder(name: str) -> Path:
    """A checkpoint folder, or the name of a bundled model."""
    from mtplab.models import BUNDLED, bundled

    folder = bundled(name) if name in BUNDLED else Path(name).expanduser()
    if not folder.is_dir():
        raise RequestError(f"--model {name} has no folder {folder}; give a checkpoint folder")
    return folder


def prompts(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """The first `--prompts` texts of the corpus, each cut to its last `--prompt-tokens` tokens."""
    path = ROOT / "mtplab" / "data" / "corpora" / f"{args.corpus}.jsonl"
    if not path.is_file():
        raise RequestError(f"--corpus {args.corpus} is not bundled; use c or novel")
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    if args.prompts > len(texts):
        raise RequestError(f"--prompts {args.prompts} but the corpus {args.corpus} has {len(texts)}; ask for fewer")
    return [tokenizer.encode(text)[-args.prompt_tokens :] for text in texts[: args.prompts]]


@dataclass(frozen=True, slots=True)
class Span:
    """From the first token of a request to its last: tokens after the first, and nanoseconds on three clocks."""

    tokens: int
    wall_ns: int
    cpu_ns: int  # all threads of the process
    host_ns: int  # the Python thread alone: building graphs, reading results, bookkeeping

    @classmethod
    def of(cls, emitted: Iterable[int]) -> Span:
        """Consume a decoder that reports how many tokens it emitted, step by step; the wall is read at every one."""
        tokens, first, last, cpu, host = 0, 0, 0, 0, 0
        for count in emitted:
            last = time.perf_counter_ns()
            if not first:
                first, cpu, host, count = last, time.process_time_ns(), time.thread_time_ns(), count - 1
            tokens += count
        return cls(tokens, last - first, time.process_time_ns() - cpu, time.thread_time_ns() - host)


def per_token(spans: Sequence[Span]) -> Row:
    """tok/s = (N - 1) / (t_last - t_first) over all requests; milliseconds a token on the wall and of both CPU clocks.

    CPU times are far less disturbed by a busy machine than the wall is: they show cost where the wall shows noise, but
    not what runs at the same time as something else, so no limit is about them.
    """
    tokens = sum(s.tokens for s in spans)
    if not tokens:
        return dict.fromkeys(("tok_s", "tpot_ms", "cpu_ms", "host_ms")) | {"tokens": len(spans)}
    wall, cpu, host = (sum(getattr(s, name) for s in spans) / 1e6 / tokens for name in ("wall_ns", "cpu_ns", "host_ns"))
    return {"tok_s": 1e3 / wall, "tpot_ms": wall, "cpu_ms": cpu, "host_ms": host, "tokens": tokens + len(spans)}


# Rounds of sides ---------------------------------------------------------------------------------------------------


class SideFailed(Exception):
    """A side's process ended without a result."""


def order(sides: Sequence[str], round_: int, seed: int = SEED) -> list[str]:
    """Shuffled in even rounds, the same reversed in odd ones: every pair stands in both orders."""
    shuffled = list(sides)
    random.Random(seed + round_ // 2).shuffle(shuffled)
    return shuffled[::-1] if round_ % 2 else shuffled


def run_side(side: str, round_: int, timeout: int) -> Row:
    """This script again in a fresh process, with the same flags plus `--side`."""
    command = [sys.executable, *sys.argv, "--side", side, "--round", str(round_)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *_path_entries()])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired:
        raise SideFailed(f"took longer than --timeout {timeout} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise SideFailed(_last(done.stderr) or f"exit code {done.returncode} and nothing printed")
    try:
        return json.loads(lines[-1])
    except ValueError:
        raise SideFailed(f"its last line is no JSON: {lines[-1][:80]}") from None


def _path_entries() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def interleaved(sides: Sequence[str], rounds: int, timeout: int) -> tuple[list[Round], list[Row]]:
    """(complete rounds, what failed). A failure ends its round: the sides after it are not run."""
    complete, failed = [], []
    for r in range(rounds):
        rows: Round = {}
        for side in order(sides, r):
            progress(f"round {r + 1} of {rounds}: {side}")
            try:
                rows[side] = run_side(side, r, timeout)
            except SideFailed as error:
                failed.append({"round": r, "side": side, "reason": str(error)})
                progress(f"round {r + 1} is left out: {side}: {error}")
                break
        if len(rows) == len(sides):
            complete.append(rows)
    return complete, failed


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Numbers over rounds -----------------------------------------------------------------------------------------------


def median_interval(values: Sequence[float]) -> dict[str, Any]:
    """Median over rounds with its percentile bootstrap interval; one round has none."""
    if not values:
        return {"value": None, "low": None, "high": None, "rounds": 0}
    x = np.asarray(values, dtype=np.float64)
    out = {"value": float(np.median(x)), "low": None, "high": None, "rounds": int(x.size)}
    if x.size > 1:
        pick = np.random.default_rng(SEED).integers(x.size, size=(RESAMPLES, x.size))
        tail = (1 - LEVEL) / 2
        low, high = np.quantile(np.median(x[pick], axis=1), [tail, 1 - tail])
        out |= {"low": float(low), "high": float(high)}
    return out


def compare(rounds: Sequence[Round], wanted: Wanted) -> dict[str, Any]:
    """The ratio within each round, its median and interval, and whether the limit is met."""
    pairs = [(r[wanted.over][wanted.key], r[wanted.under][wanted.key]) for r in rounds]
    values = [a / b for a, b in pairs if a is not None and b]
    return judged(wanted.name, values, wanted.sense, wanted.limit)


def judged(name: str, values: Sequence[float], sense: str | None = None, limit: float | None = None) -> dict[str, Any]:
    """A number of every round under its name: median, interval, and whether the limit is met."""
    return {"name": name} | median_interval(values) | verdict(values, sense, limit)


def verdict(values: Sequence[float], sense: str | None, limit: float | None) -> dict[str, Any]:
    """`met` is about the median; `clear` says that the interval lies on that same side as a whole."""
    out = {"wanted": None if sense is None else f"{sense} {limit}", "met": None, "clear": None}
    m = median_interval(values)
    if sense is None or m["value"] is None:
        return out
    met = [SENSES[sense](x, limit) for x in (m["value"], m["low"], m["high"]) if x is not None]
    return out | {"met": met[0], "clear": len(met) == 3 and len(set(met)) == 1}


def medians(rounds: Sequence[Round], *keys: str) -> dict[str, dict[str, float | None]]:
    """Side -> the median over the rounds of some of its numbers."""
    table: dict[str, dict[str, float | None]] = {}
    for side in rounds[0] if rounds else {}:
        found = {k: [r[side][k] for r in rounds if r[side].get(k) is not None] for k in keys}
        table[side] = {k: statistics.median(x) if x else None for k, x in found.items()}
    return table


def same(rounds: Sequence[Round], key: str, what: str) -> None:
    """Every side of every round must report one and the same value, or the comparison means nothing."""
    found = {json.dumps(row[key], sort_keys=True) for r in rounds for row in r.values() if key in row}
    if len(found) > 1:
        raise RequestError(f"the sides differ in {what}: {' against '.join(sorted(found))[:300]}; nothing is compared")


# The document ------------------------------------------------------------------------------------------------------


def _all_rounds(
    name: str, args: argparse.Namespace, sides: list[str], ratios: list[Wanted], extra: Extra | None
) -> int:
    model_folder(args.model)  # refused before anything runs
    before = machine.load_average()
    warn = busy(before)
    for text in warn:
        progress(f"warning: {text}")
    rounds, failed = interleaved(sides, args.rounds, args.timeout)
    for r in rounds:
        for row in r.values():
            row["blas"] = {k: row["machine"]["blas"].get(k) for k in ("kind", "version", "threads")}
    same(rounds, "blas", "their BLAS")
    compared = [compare(rounds, w) for w in ratios]
    more = extra(args, rounds) if extra is not None and rounds else {}
    compared += more.pop("ratios", [])
    facts = dict(next(iter(rounds[0].values()))["machine"]) if rounds else machine.facts()
    document = {
        "schema": SCHEMA,
        "benchmark": Path(name).stem,
        "model": Path(args.model).name,
        "machine": facts | {"load_average": {"before": before, "after": machine.load_average()}},
        "settings": {k: v for k, v in vars(args).items() if k not in ("model", "side", "round", "timeout")},
        "rounds": len(rounds),
        "ratios": compared,
        **more,
        "samples": [{s: _sample(row) for s, row in r.items()} for r in rounds],
        "failed": failed,
        "warnings": warn + disturbed(rounds) + few(rounds, args.rounds),
    }
    output.emit(document)
    if failed:
        raise TrialsFailed(f"{len(failed)} of {args.rounds} rounds failed and were left out; see `failed`")
    return 0


def _sample(row: Row) -> Row:
    """What is kept of a side: its numbers and whether somebody disturbed it, not the machine's facts again."""
    kept = {k: v for k, v in row.items() if k not in ("machine", "load", "blas", "requests")}
    return kept | {"disturbed": row["load"]["disturbed"], "others": row["load"]["other_mean"]}


def busy(load: Sequence[float] | None) -> list[str]:
    """A warning if the machine was at work before the benchmark began."""
    cores = machine.cores() or 1
    if not load or load[0] <= BUSY * cores:
        return []
    return [f"the load average was {load[0]} on {cores} cores before the start: these times are not of a quiet machine"]


def disturbed(rounds: Sequence[Round]) -> list[str]:
    rows = [row for r in rounds for row in r.values()]
    hit = sum(bool(row["load"]["disturbed"]) for row in rows)
    return [f"other processes disturbed {hit} of {len(rows)} measurements"] if hit else []


def few(rounds: Sequence[Round], asked: int) -> list[str]:
    """Too few rounds for an interval, unless one round is all there is to ask for (memory does not vary)."""
    n = len(rounds)
    if n == asked == 1:
        return []
    return [f"{n} complete rounds, fewer than {FEW_ROUNDS}: intervals are rough"] if n < FEW_ROUNDS else []
