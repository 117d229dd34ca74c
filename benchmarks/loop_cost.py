"""What the loop itself costs: depth0 against the baseline, and tracing on against off.

`depth0` is the speculative loop with nothing to verify. It does the baseline's work (one row, one token, the next step
launched before this one is read) plus the policy, the bookkeeping and the larger record; that must be hidden behind
the device or be small: 1.02 of the baseline's time per token at most.

Tracing writes every record as a JSON line to a file while decoding (`mtplab.trials.trace`); 1.01 at most. In the
baseline the line is made while the next step runs; a pass with drafts has nothing under way meanwhile, so there the
cost is in the open, but there are fewer passes. Both are measured: `--traced baseline depth3` (a model without an MTP
head: `--traced baseline`).

The difference of two processes is as noisy as the machine, so what writing took inside the run is added up, too: `its
own time`, the run with it against the same run without it.

Time per token = (t_last - t_first) / (N - 1), read by the consumer, summed over the prompts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common

WARM_TOKENS = 24


def options() -> argparse.ArgumentParser:
    parser = common.options(__doc__, rounds=12)
    parser.add_argument("--traced", nargs="*", default=["baseline", "depth3"], help="arms to trace; default both")
    return parser


def sides(args: argparse.Namespace) -> list[str]:
    return [*dict.fromkeys(["baseline", "depth0", *args.traced]), *(f"{arm}_traced" for arm in args.traced)]


def measure(args: argparse.Namespace, side: str) -> common.Row:
    from mtplab.models import load_target
    from mtplab.trials.arms import Session, parse_arm

    arm = parse_arm(side.removesuffix("_traced"))
    loaded = load_target(common.model_folder(args.model), head="auto")
    session, texts = Session(loaded, arm), common.prompts(args, loaded.tokenizer)
    with tempfile.TemporaryDirectory() as folder, timed_writer(Path(folder) / "trace.jsonl") as trace:
        writer = trace if side.endswith("_traced") else None
        common.Span.of(emitted(session, texts[0], min(WARM_TOKENS, args.max_tokens), writer))
        trace.spent_ns = 0
        spans = [common.Span.of(emitted(session, prompt, args.max_tokens, writer)) for prompt in texts]
        written = trace.path.stat().st_size
    row = common.per_token(spans) | {"trace_bytes": written}
    if row["tpot_ms"] is None:
        return row
    own = trace.spent_ns / 1e6 / (row["tokens"] - len(spans))
    return row | {"trace_ms": own, "without_trace_ms": row["tpot_ms"] - own}


def timed_writer(path: Path) -> Any:
    """A TraceWriter that adds up what it takes: lines, writes and flushes."""
    from mtplab.trials.trace import TraceWriter

    class Timed(TraceWriter):
        spent_ns = 0

        def write(self, record: Any, request: str) -> None:
            began = time.perf_counter_ns()
            super().write(record, request)
            self.spent_ns += time.perf_counter_ns() - began

        def _flush(self) -> None:
            began = time.perf_counter_ns()
            super()._flush()
            self.spent_ns += time.perf_counter_ns() - began

    return Timed(path)


def emitted(session: Any, prompt: list[int], count: int, trace: Any) -> Iterator[int]:
    """Tokens emitted by every pass, written to the trace on the way where there is one."""
    from mtplab.decode.settings import Settings

    records = session.run(prompt, request=0, settings=Settings(max_tokens=count, ignore_eos=True))
    return (r.emitted for r in (records if trace is None else trace.watch(records, request="0")))


def extra(args: argparse.Namespace, rounds: Sequence[common.Round]) -> dict[str, Any]:
    pairs = [("depth0 / baseline", "depth0", "baseline", 1.02)]
    pairs += [(f"{arm}, tracing on / off", f"{arm}_traced", arm, 1.01) for arm in args.traced]
    wanted = [common.Wanted(name, a, b, "tpot_ms", "at most", limit) for name, a, b, limit in pairs]
    wanted += [common.Wanted(f"{name}, CPU time", a, b, "cpu_ms") for name, a, b, _ in pairs]
    common.same(rounds, "tokens", "the number of tokens")
    times = common.medians(rounds, "tpot_ms", "cpu_ms", "host_ms", "trace_ms")
    ratios = [common.compare(rounds, w) for w in wanted]
    for arm in args.traced:  # within one process and one run: what the machine does meanwhile divides out
        sides = [r[f"{arm}_traced"] for r in rounds]
        shares = [side["tpot_ms"] / side["without_trace_ms"] for side in sides if "without_trace_ms" in side]
        name = f"{arm}, tracing, its own time"
        ratios.append(common.judged(name, shares, "at most", 1.01))
    return {"sides": times, "ratios": ratios}


if __name__ == "__main__":
    raise SystemExit(common.main(options(), sides, measure, extra=extra))
