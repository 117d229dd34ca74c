"""The fault zoo: faults of known cause through `Diagnoser`, as a user's models would meet it, and a confusion table.

    python tests/diagnose/zoo.py            every fault, 200 sound runs, and 200 under coarse arithmetic
    python tests/diagnose/zoo.py --only ring --clean 0 --rough 0

The right verdict of each case is known beforehand; where a layer or a module can be named, it must be the right one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import os

    os.environ["MTPLAB_BLAS"] = "reference"
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    from mtplab import backend

    backend.setup()

import mlx.core as mx
import tiny

from mtplab.backend import numerics
from mtplab.decode.settings import Settings
from mtplab.decode.stopping import Stops
from mtplab.diagnose.candidates import Candidate
from mtplab.diagnose.diverge import Diagnoser, Diagnosis, Text
from mtplab.diagnose.verdict import Verdict, gravest
from mtplab.models.loader import Loaded, load_target

sys.path.insert(0, str(Path(__file__).parent))

import block_faults as b
import latent  # noqa: F401  (its tiny models)
from zoo_cases import DEPTH0, HEAD, PACKED, SCRIPTED, Case, cases


@dataclass(frozen=True, slots=True)
class Outcome:
    case: Case
    verdict: str
    reason: str
    where: str | None
    seconds: float

    @property
    def right(self) -> bool:
        return self.verdict == self.case.verdict

    @property
    def placed(self) -> bool | None:
        """Whether the named layer or module is the right one; None where there is none to name."""
        if self.case.where is None:
            return None
        return self.where is not None and fnmatchcase(f".{self.where}", f"*{self.case.where}")


class Zoo:
    """Builds each tiny checkpoint once, in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def load(self, kind: str, build: dict[str, Any], seed: int = 0, **options: Any) -> Loaded:
        name = "-".join([kind, str(seed), *(f"{k}={v}" for k, v in sorted(build.items()))])
        path = self.folder / name
        if not path.exists():
            tiny.build(path, kind, seed=seed, **build)
        return load_target(path, **options)

    def run(self, case: Case) -> Outcome:
        began = time.perf_counter()
        loaded = self.load(case.kind, case.build, **case.load)
        if case.pairs is not None:
            pair_rows(loaded, case.pairs)
        with ExitStack() as stack:
            if case.spec is not None:
                stack.enter_context(numerics.simulate(loaded.target, case.spec))
            if case.model is not None:  # on top: simulated kernels compute their products themselves
                stack.enter_context(case.model(loaded))
            options = {"tamper": case.tamper, "eos": case.eos, "seed": case.seed}
            found = diagnose(loaded, case.arms, case.prompt, case.tokens, **options)
        verdict = worst(found)
        seconds = time.perf_counter() - began
        return Outcome(case, verdict.verdict, verdict.reason, where(verdict, loaded), seconds)


def pair_rows(loaded: Loaded, apart: float) -> None:
    """Every second row of the unembedding becomes its neighbour, `apart` (of its size) away: near-ties everywhere."""
    head = getattr(loaded.target.outer, "lm_head", None) or loaded.target.embedding
    head.weight = b.twins(head.weight, apart)
    mx.eval(head.weight)


def diagnose(
    loaded: Loaded, arms: Sequence[Candidate], prompt: int, tokens: int, *, tamper: Any = None, eos: int | None = None,
    seed: int = 3,
) -> Diagnosis:  # fmt: skip
    from mtplab.diagnose import locate

    ids = tuple(tiny.prompt(seed, prompt))
    settings = Settings(max_tokens=tokens)
    ends: frozenset[int] = frozenset()
    if eos is not None:
        plain = Diagnoser(loaded.target, settings=settings).run([Text("a", ids)], [])
        text = plain.prompts[0].tokens
        ends = frozenset([next(t for i, t in enumerate(text) if i >= eos and t not in text[:i])])
    diagnoser = Diagnoser(
        loaded.target, settings=settings, stops=lambda: Stops(settings, ends), head=loaded.head, tamper=tamper,
        locate=locate.locate,
    )  # fmt: skip
    return diagnoser.run([Text("a", ids)], arms)


def worst(found: Diagnosis) -> Verdict:
    every = [v for by in found.verdicts.values() for v in by.values()]
    grave = gravest([v.verdict for v in every])
    return next(v for v in every if v.verdict == grave)


def where(verdict: Verdict, loaded: Loaded) -> str | None:
    from mtplab.diagnose.state import layer_paths

    return verdict.module or (None if verdict.layer is None else layer_paths(loaded.target)[verdict.layer])


def clean(zoo: Zoo) -> Iterator[tuple[str, Verdict]]:
    """Runs without any fault, without end: every kind, many prompts and seeds."""
    for round_number in itertools.count():
        for kind in ("llama", "mimo", "qwen3_5", "gemma3_text"):
            loaded = zoo.load(kind, {}, seed=round_number % 5)
            arms = [SCRIPTED, Candidate("scripted2", "scripted", 2), Candidate("ngram3", "ngram", 3), DEPTH0]
            arms += [HEAD] if loaded.head is not None else []
            found = diagnose(loaded, arms, 6 + 9 * (round_number % 4), 32, seed=100 + round_number)
            for arm, by in found.verdicts.items():
                yield f"{kind} {arm} {round_number}", next(iter(by.values()))


ROUGH = ("splitk@*", "bf16acc:8@*", "lowp@*", "noise:1e-2@*", "noise:1e-2@layers.2.*", "noise:1e-3@layers.1.*")
FAMILIES = ("llama", "mimo", "qwen3_5", "gemma3_text", "deepseek_v3", "deepseek_v32", "qwen3_moe", "llama 4", "llama 2")


def rough(zoo: Zoo) -> Iterator[tuple[str, Verdict]]:
    """The same under coarse arithmetic, every family and quantized caches: equal or numeric, never a fault."""
    for number, (spec, family) in enumerate(itertools.cycle(itertools.product(ROUGH, FAMILIES))):
        kind, _, bits = family.partition(" ")
        more = PACKED[int(bits)] if bits else {"load": {}, "build": {}}
        loaded = zoo.load(kind, more["build"], **more["load"])
        arms = [SCRIPTED, Candidate("scripted8", "scripted", 8)] + ([HEAD] if loaded.head is not None else [])
        with numerics.simulate(loaded.target, spec):
            found = diagnose(loaded, arms, 7 + 11 * (number % 4), 40, seed=500 + number)
        for arm, by in found.verdicts.items():
            yield f"{family} {spec} {arm} {number}", next(iter(by.values()))


def table(outcomes: Iterable[Outcome], clean_runs: Sequence[Verdict], rough_runs: Sequence[Verdict] = ()) -> str:
    """Markdown: known cause against verdict, then each case."""
    outcomes = list(outcomes)
    columns = ("equal", "numeric", "logic", "length", "unknown")
    sound = {"none": clean_runs, "none, coarse arithmetic": rough_runs}
    counts = Counter((o.case.verdict, o.verdict) for o in outcomes)
    counts += Counter((cause, v.verdict) for cause, runs in sound.items() for v in runs)
    lines = ["| known cause | runs | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for cause in (*sound, "numeric", "logic", "length"):
        row = [counts[cause, c] for c in columns]
        lines.append(f"| {cause} | {sum(row)} | " + " | ".join(map(str, row)) + " |")
    placed = [o.placed for o in outcomes if o.placed is not None]
    lines += ["", f"Named layer or module right: {sum(placed)} of {len(placed)}.", ""]
    lines += ["| fault | model | known cause | verdict | named |", "|---|---|---|---|---|"]
    for o in outcomes:
        flag = "" if o.right and o.placed is not False else " **wrong**"
        lines.append(f"| {o.case.name} | {o.case.kind} | {o.case.verdict} | {o.verdict}{flag} | {o.where or '-'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--clean", type=int, default=200, help="runs without a fault [200]")
    parser.add_argument("--rough", type=int, default=200, help="the same under coarse arithmetic [200]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        zoo, outcomes = Zoo(Path(folder)), []
        for case in cases():
            if args.only in case.name:
                outcomes.append(zoo.run(case))
                o = outcomes[-1]
                mark = "ok " if o.right and o.placed is not False else "BAD"
                print(f"{mark} {o.seconds:5.1f}s {case.name}: {o.verdict} ({o.reason}) {o.where}", file=sys.stderr)
        runs = [list(itertools.islice(*some)) for some in ((clean(zoo), args.clean), (rough(zoo), args.rough))]
    alarms = [(name, v) for some in runs for name, v in some if v.verdict not in ("equal", "numeric")]
    for name, verdict in alarms:
        print(f"BAD clean {name}: {verdict.verdict} ({verdict.reason})", file=sys.stderr)
    print(table(outcomes, *([v for _, v in some] for some in runs)), end="")
    return int(bool(alarms or any(not o.right or o.placed is False for o in outcomes)))


if __name__ == "__main__":
    raise SystemExit(main())
