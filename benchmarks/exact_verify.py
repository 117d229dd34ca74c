"""What does an exact verify cost? batched, rowwise, fixed and serial: time per verify and time per token, as ratios.

Each way runs the same prompts at the same depth in a process of its own (the model's MTP head, or prompt lookup where
it has none), next to one-token decoding (`baseline`) and one-token decoding at the fixed width (`baseline_fixed`).

verify_ms  a block of depth + 1 rows, forward pass and argmax, fenced, with about the cache of the middle of a request
tpot_ms    (t_last - t_first) / (N - 1) of the whole loop, summed over the prompts

The same run says whether each way kept its promise: `equal_to_baseline` counts the prompts whose tokens are those of
`baseline` (rowwise, serial; batched where the machine does not care for the width), or of `baseline_fixed` (fixed).
No ratio has a limit: exactness costs what it costs, and this is the number.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import common

WARM_TOKENS, REPEATS = 24, 25
WAYS = ("batched", "rowwise", "fixed", "serial")


def options() -> argparse.ArgumentParser:
    parser = common.options(__doc__, rounds=5)
    parser.add_argument("--depth", type=common.positive, default=3, help="drafts per pass; default 3")
    return parser


def sides(_args: argparse.Namespace) -> list[str]:
    return ["baseline", "baseline_fixed", *WAYS]


def measure(args: argparse.Namespace, side: str) -> common.Row:
    from mtplab.decode.settings import Settings
    from mtplab.models import load_target
    from mtplab.trials.arms import Session, parse_arm

    loaded = load_target(common.model_folder(args.model), head="auto")
    kind = "ngram" if loaded.head is None else "depth"
    drafts = not side.startswith("baseline")
    arm = parse_arm(f"{kind}{args.depth}" if drafts else "baseline")
    way = side if drafts else "fixed" if side == "baseline_fixed" else "batched"
    session, texts = Session(loaded, arm, verify=way, width=args.depth + 1), common.prompts(args, loaded.tokenizer)
    made: list[list[int]] = []

    def emitted(prompt: list[int], count: int) -> Iterator[int]:
        made.append([])
        for record in session.run(prompt, request=0, settings=Settings(max_tokens=count, ignore_eos=True)):
            made[-1].extend(record.emitted_tokens if hasattr(record, "drafts") else [record.token])
            yield record.emitted

    common.Span.of(emitted(texts[0], min(WARM_TOKENS, args.max_tokens)))
    made.clear()
    spans = [common.Span.of(emitted(prompt, args.max_tokens)) for prompt in texts]
    rows = args.prompt_tokens + args.max_tokens // 2
    width = args.depth + 1 if drafts else 1
    facts = {"verify_ms": verify_ms(session, rows, width), "generated": made, "arm": arm.name}
    return common.per_token(spans) | facts | {"ways": session.verifier.effective()}


def verify_ms(session: Any, rows: int, width: int) -> float:
    """Median milliseconds of a fenced pass of `width` rows on a cache of about `rows` rows."""
    import mlx.core as mx

    from mtplab.backend.clock import MonotonicClock

    way, clock, times = session.verifier, MonotonicClock(), []
    ids = mx.array([7 * i % min(97, way.vocab or 97) for i in range(rows + width)])
    cache = way.new_cache(rows + width)
    mx.eval(way.forward(ids[:rows], cache).logits[-1:], cache.arrays())
    for _ in range(REPEATS + 2):
        began = clock.now_ns()
        with cache.attempt(width):
            mx.eval(mx.argmax(way.forward(ids[rows:], cache).logits, axis=-1), cache.arrays())
            times.append(clock.now_ns() - began)
    return statistics.median(times[2:]) / 1e6


def extra(args: argparse.Namespace, rounds: Sequence[common.Round]) -> dict[str, Any]:
    m = args.depth + 1
    wanted = [common.Wanted(f"verify of {m} rows: {way} / batched", way, "batched", "verify_ms") for way in WAYS[1:]]
    wanted += [common.Wanted(f"verify of {m} rows / one row: {way}", way, "baseline", "verify_ms") for way in WAYS]
    wanted += [common.Wanted(f"time per token: {way} / batched", way, "batched", "tpot_ms") for way in WAYS[1:]]
    wanted += [common.Wanted(f"time per token: {way} / baseline", way, "baseline", "tpot_ms") for way in WAYS]
    wanted.append(common.Wanted("time per token: baseline_fixed / baseline", "baseline_fixed", "baseline", "tpot_ms"))
    ratios = [common.compare(rounds, w) for w in wanted]
    table = common.medians(rounds, "verify_ms", "tpot_ms", "cpu_ms")
    for way in WAYS:
        table[way]["equal_to_baseline"] = _equal(rounds, way)
        table[way]["prompts"] = sum(len(r[way]["generated"]) for r in rounds)
    for row in (row for r in rounds for row in r.values()):
        del row["generated"]
    return {"sides": table, "ratios": ratios}


def _equal(rounds: Sequence[common.Round], way: str) -> int:
    """Prompts, over all rounds, whose tokens are those of the baseline that this way promises."""
    base = "baseline_fixed" if way == "fixed" else "baseline"
    return sum(a == b for r in rounds for a, b in zip(r[way]["generated"], r[base]["generated"], strict=True))


if __name__ == "__main__":
    raise SystemExit(common.main(options(), sides, measure, extra=extra))
