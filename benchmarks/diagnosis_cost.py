"""What a diagnosis costs: `mtplab diverge` with its default arms against one baseline pass over the same prompts.

A diagnosis decodes every prompt with the baseline twice and with each arm, compares every row and every state, and
looks closer where bits differ. Wanted: at most 10 baseline passes for 8 prompts x 256 tokens of `lab-mtp`. Loading the
model counts as part of the diagnosis; `cpu_s` is CPU time of all threads, which a busy machine disturbs less.

A diagnosis takes minutes, in which a machine's speed drifts, and a baseline pass seconds. So the pass is measured
twice: prompt by prompt between the prompts of the diagnosis (`beside`; a second copy of the model, its time taken off),
and as a whole in a process of its own.
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


class Passes:
    """Baseline passes over the same prompts, and what they took."""

    def __init__(self, args: argparse.Namespace, corpora: tuple[str, ...]):
        from mtplab.decode.settings import Settings
        from mtplab.models import load_target
        from mtplab.trials import corpus
        from mtplab.trials.arms import Session, parse_arm

        loaded = load_target(common.model_folder(args.model), head="none")
        size = {"prompts": args.prompts, "prompt_tokens": args.prompt_tokens, "room": args.max_tokens}
        self.texts, _ = corpus.load_corpora(corpora, loaded.tokenizer, **size, context=loaded.context)
        self.session = Session(loaded, parse_arm("baseline"))
        self.settings = Settings(max_tokens=args.max_tokens, ignore_eos=True)
        self.wall = self.cpu = 0.0
        self.tokens = self.done = 0

    def one(self) -> None:
        """The next prompt."""
        wall, cpu, text = time.perf_counter(), time.process_time(), self.texts[self.done]
        made = self.session.request(text.tokens, request=self.done, settings=self.settings)
        self.tokens, self.done = self.tokens + len(made.tokens), self.done + 1
        self.wall, self.cpu = self.wall + time.perf_counter() - wall, self.cpu + time.process_time() - cpu

    def between(self, text: str) -> None:
        """What `diverge` says. After each prompt: the same prompt here."""
        common.progress(text)
        if self.done < len(self.texts) and text.startswith(f"{self.texts[self.done].id}: "):
            self.one()


def measure(args: argparse.Namespace, side: str) -> common.Row:
    from mtplab.trials.diverging import CORPORA, Wanted, diverge

    corpora = (args.corpus,) if args.corpus else CORPORA
    passes = Passes(args, corpora)
    if side == "baseline":
        for _ in passes.texts:
            passes.one()
        return {"wall_s": passes.wall, "cpu_s": passes.cpu, "tokens": passes.tokens}
    size = {"prompts": args.prompts, "prompt_tokens": args.prompt_tokens, "max_tokens": args.max_tokens}
    wall, cpu = time.perf_counter(), time.process_time()
    found = diverge(Wanted(str(common.model_folder(args.model)), corpora=corpora, **size), passes.between)
    wall, cpu = time.perf_counter() - wall - passes.wall, time.process_time() - cpu - passes.cpu
    if passes.done < len(passes.texts):
        raise RuntimeError(f"only {passes.done} of {len(passes.texts)} baseline passes were run beside the diagnosis")
    row = {"wall_s": wall, "cpu_s": cpu, "tokens": found["compared"], "verdict": found["verdict"]}
    return row | {"beside_wall_s": passes.wall, "beside_cpu_s": passes.cpu}


LIMIT = ("at most", 10.0)
RATIOS = [
    common.Wanted("diagnosis / baseline pass of its own, time", "diverge", "baseline", "wall_s", *LIMIT),
    common.Wanted("diagnosis / baseline pass of its own, CPU time", "diverge", "baseline", "cpu_s"),
]


def extra(args: argparse.Namespace, rounds: Sequence[common.Round]) -> dict[str, Any]:
    ratios = [
        beside(rounds, "diagnosis / baseline beside it, time", "wall_s", *LIMIT),
        beside(rounds, "diagnosis / baseline beside it, CPU time", "cpu_s"),
    ]
    sides = common.medians(rounds, "wall_s", "cpu_s", "beside_wall_s", "beside_cpu_s", "tokens")
    return {"sides": sides, "ratios": ratios}


def beside(
    rounds: Sequence[common.Round], name: str, key: str, sense: str | None = None, limit: float | None = None
) -> dict[str, Any]:
    values = [r["diverge"][key] / r["diverge"][f"beside_{key}"] for r in rounds]
    return common.judged(name, values, sense, limit)


if __name__ == "__main__":
    raise SystemExit(common.main(options(), ("baseline", "diverge"), measure, RATIOS, extra))
