"""Memory: is anything held beyond the weights and the caches, and does anything grow that should not?

  peak    the highest memory while decoding (prefill included, loading not) against weights + caches, head included:
          1.05 at most. What is on top of them are activations and the copy that a growing cache makes of itself.
  grown   active memory after 50 and after 2,000 verify passes of ONE request: the difference must be the caches' own
          growth and nothing else. Records, pending rows of the head and forgotten graphs would show here.

mlx's own counters are read (`mx.get_peak_memory`, `mx.get_active_memory`); the process's resident peak is reported
beside them. The long run is sampled at temperature 1 with point drafts: where nearly every draft is accepted, as in
greedy loops or with drafts drawn from a good head, the model's context ends before 2,000 passes are done.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import common

from mtplab.errors import RequestError

SIDES = ("peak", "grown")
PEAK_LIMIT, GROWTH_LIMIT = 1.05, 0.01  # growth: share of the weights


def options() -> argparse.ArgumentParser:
    parser = common.options(__doc__, rounds=1, prompts=1, max_tokens=256)
    parser.add_argument("--depth", type=common.positive, default=3, help="of the MTP head; default 3")
    parser.add_argument("--passes", type=common.positive, nargs=2, default=[50, 2000], help="default 50 2000")
    return parser


class Run:
    """One request of the speculative loop whose caches can be looked at."""

    def __init__(self, args: argparse.Namespace, loaded: Any, *, max_tokens: int, temp: float):
        from mtplab.backend import MonotonicClock
        from mtplab.decode.drafters.mtp import MTPDrafter
        from mtplab.decode.policy import FixedDepth
        from mtplab.decode.selection import Draws
        from mtplab.decode.settings import Settings
        from mtplab.decode.speculative import speculative
        from mtplab.decode.stopping import Stops

        settings = Settings(max_tokens=max_tokens, temp=temp, ignore_eos=True)
        self.cache = loaded.target.new_cache()
        self.drafter = MTPDrafter(loaded.head, settings, Draws(settings.seed, 0), drafts="point")
        self.records: Iterator[Any] = speculative(
            loaded.target,
            self.cache,
            common.prompts(args, loaded.tokenizer)[0],
            drafter=self.drafter,
            policy=FixedDepth(args.depth),
            settings=settings,
            stops=Stops(settings),
            clock=MonotonicClock(),
        )

    @property
    def cache_bytes(self) -> int:
        """Buffers of the target's and the head's caches as they are allocated."""
        return self.cache.nbytes + sum(c.nbytes for c in self.drafter.cache)


def load(args: argparse.Namespace) -> Any:
    """The model with its head; what loading needed is not counted."""
    import mlx.core as mx

    from mtplab.models import load_target

    loaded = load_target(common.model_folder(args.model), head="require")
    gc.collect()
    mx.clear_cache()
    return loaded


def peak(args: argparse.Namespace) -> common.Row:
    import mlx.core as mx

    loaded = load(args)
    after_load, load_peak = mx.get_active_memory(), mx.get_peak_memory()
    run = Run(args, loaded, max_tokens=args.max_tokens, temp=0.0)
    mx.reset_peak_memory()
    tokens = sum(r.emitted for r in run.records)
    weights = loaded.facts["weight_bytes"] + loaded.facts["head_bytes"]
    return {
        "tokens": tokens,
        "weight_bytes": weights,
        "cache_bytes": run.cache_bytes,
        "peak_bytes": mx.get_peak_memory(),
        "load_peak_bytes": load_peak,
        "active_after_load_bytes": after_load,
        "resident_peak_bytes": resident_peak(),
    }


def resident_peak() -> int:
    """The process's own high-water mark; Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def grown(args: argparse.Namespace) -> common.Row:
    import mlx.core as mx

    loaded, (early, late) = load(args), sorted(args.passes)
    room = loaded.context - args.prompt_tokens
    run = Run(args, loaded, max_tokens=room, temp=1.0)
    seen: dict[int, tuple[int, int]] = {}
    for record in run.records:
        passes = getattr(record, "index", -1) + 1
        if passes in (early, late):
            gc.collect()
            seen[passes] = mx.get_active_memory(), run.cache_bytes
        if passes == late:
            break
    if late not in seen:
        raise RequestError(
            f"the context of {loaded.context} tokens was full before {late} passes; lower --passes or --depth"
        )
    active, caches = (seen[late][i] - seen[early][i] for i in (0, 1))
    return {
        "passes": [early, late],
        "tokens": run.cache.length - args.prompt_tokens,
        "active_bytes": [seen[early][0], seen[late][0]],
        "cache_bytes": [seen[early][1], seen[late][1]],
        "beyond_caches_bytes": active - caches,
        "weight_bytes": loaded.facts["weight_bytes"] + loaded.facts["head_bytes"],
    }


def measure(args: argparse.Namespace, side: str) -> common.Row:
    return {"peak": peak, "grown": grown}[side](args)


def extra(args: argparse.Namespace, rounds: Sequence[common.Round]) -> dict[str, Any]:
    peaks = [r["peak"]["peak_bytes"] / (r["peak"]["weight_bytes"] + r["peak"]["cache_bytes"]) for r in rounds]
    growth = [1 + r["grown"]["beyond_caches_bytes"] / r["grown"]["weight_bytes"] for r in rounds]
    early, late = sorted(args.passes)
    entries = (
        ("peak / (weights + caches)", peaks, "at most", PEAK_LIMIT),
        (f"1 + growth beyond the caches, {early} to {late} passes / weights", growth, "within", GROWTH_LIMIT),
    )
    ratios = [common.judged(*entry) for entry in entries]
    last = rounds[-1]
    return {"sides": {s: {k: v for k, v in last[s].items() if "bytes" in k} for s in SIDES}, "ratios": ratios}


if __name__ == "__main__":
    raise SystemExit(common.main(options(), SIDES, measure, extra=extra))
