"""What a diagnosis costs: `mtplab diverge` with its default arms against one baseline pass over the same prompts.

A diagnosis decodes every prompt with the baseline twice and with each arm, compares every row and every state, and
looks closer where bits differ. Wanted: at most 10 baseline passes for 8 prompts x 256 tokens of `lab-mtp`. Loading the
model counts as part of the diagnosis; `cpu_s` is CPU time of all threads, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import common


def options() -> argparse.ArgumentParser:
    parser = common.options(__doc__, rounds=3, max_tokens=256)
    parser.set_defaults(prompts=4, prompt_tokens=96, corpus=None)  # of each bundled corpus
    return parser


def measure(args: argparse.Namespace, side: str) -> common.Row:
    from mtplab.trials.diverging import CORPORA, Wanted, diverge

    corpora = (args.corpus,) if args.corpus else CORPORA
    if side == "baseline":
        return baseline(args, corpora)
    size = {"prompts": args.prompts, "prompt_tokens": args.prompt_tokens, "max_tokens": args.max_tokens}
    wall, cpu = time.perf_counter(), time.process_time()
    found = diverge(Wanted(str(common.model_folder(args.model)), corpora=corpora, **size), common.progress)
    row = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "tokens": found["compared"]}
    return row | {"verdict": found["verdict"]}


def baseline(args: argparse.Namespace, corpora: tuple[str, ...]) -> common.Row:
    """One baseline pass over the same prompts."""
    from mtplab.decode.settings import Settings
    from mtplab.models import load_target
    from mtplab.trials import corpus
    from mtplab.trials.arms import Session, parse_arm

    loaded = load_target(common.model_folder(args.model), head="none")
    size = {"prompts": args.prompts, "prompt_tokens": args.prompt_tokens, "room": args.max_tokens}
    texts, _ = corpus.load_corpora(corpora, loaded.tokenizer, **size, context=loaded.context)
    session, settings = Session(loaded, parse_arm("baseline")), Settings(max_tokens=args.max_tokens, ignore_eos=True)
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = sum(len(session.request(t.tokens, request=i, settings=settings).tokens) for i, t in enumerate(texts))
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "tokens": tokens}


RATIOS = [
    common.Wanted("diagnosis / baseline pass, time", "diverge", "baseline", "wall_s", "at most", 10.0),
    common.Wanted("diagnosis / baseline pass, CPU time", "diverge", "baseline", "cpu_s"),
]


def extra(args: argparse.Namespace, rounds: Sequence[common.Round]) -> dict[str, Any]:
    return {"sides": common.medians(rounds, "wall_s", "cpu_s", "tokens")}


if __name__ == "__main__":
    raise SystemExit(common.main(options(), ("baseline", "diverge"), measure, RATIOS, extra))
