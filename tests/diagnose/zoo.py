"""The fault zoo: faults of known cause through `Diagnoser`, as a user's models would meet it, and a confusion table.

    python tests/diagnose/zoo.py            every fault, and 200 clean runs
    python tests/diagnose/zoo.py --only ring --clean 0

The right verdict of each case is known beforehand; where a layer or a module can be named, it must be the right one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
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
from mtplab.diagnose.candidates import Candidate, Parts
from mtplab.diagnose.diverge import Diagnoser, Diagnosis, Text
from mtplab.diagnose.verdict import Verdict, gravest
from mtplab.models.loader import Loaded, load_target

sys.path.insert(0, str(Path(__file__).parent))

import block_faults as b
import faults as f
import latent  # noqa: F401  (its tiny models)
from block_faults import TIES

SCRIPTED = Candidate("scripted3", "scripted", 3)
DEPTH0 = Candidate("depth0", "none", 0)
HEAD = Candidate("depth2", "mtp", 2)


@dataclass(frozen=True)
class Case:
    """One fault. `where`: pattern of the layer or module that must be named; None where there is none to name."""

    name: str
    kind: str
    verdict: str
    where: str | None = None
    tamper: Callable[[Parts], Parts] | None = None
    model: Callable[[Loaded], AbstractContextManager[Any]] | None = None
    arms: tuple[Candidate, ...] = (DEPTH0, SCRIPTED)
    tokens: int = 48
    prompt: int = 24
    eos: int | None = None  # the baseline's token at this position ends the text
    pairs: float | None = None  # rows of the unembedding come in pairs this much apart: near-ties
    spec: str | None = None  # simulated numerics
    load: dict[str, Any] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)


L = f.rows_left
late = lambda cache, n, rows, rejects: cache.length > 24 + 200  # noqa: E731
wrapped = lambda cache, n, rows, rejects: cache.length > 24 + 60  # noqa: E731
second = lambda cache, n, rows, rejects: rejects >= 2  # noqa: E731


def full_drops_one(cache: Any, attempt: Any, n: int, keep: Callable[[int], None]) -> None:
    """Only a fully accepted block loses its last row, in layer 1."""
    keep(n)
    if n == attempt.rows:
        cache.layers[1].offset -= 1


LOGIC = [
    Case("roll-back skipped", "llama", "logic", "*.layers.0", f.on_keep(L(9))),
    Case("roll-back off by one", "llama", "logic", "*.layers.0", f.on_keep(L(1))),
    Case("roll-back off by two", "mimo", "logic", "*.layers.0", f.on_keep(L(2))),
    Case("one row too few", "llama", "logic", "*.layers.0", f.on_keep(L(-1))),
    Case("roll-back skipped in layer 1", "llama", "logic", "*.layers.1", f.on_keep(L(9, layers=(1,)))),
    Case("off by one in layer 2", "mimo", "logic", "*.layers.2", f.on_keep(L(1, layers=(2,)))),
    Case("attention layer of a hybrid", "qwen3_5", "logic", "*.layers.3", f.on_keep(L(1))),
    Case("quantized KV off by one", "llama", "logic", "*.layers.0", f.on_keep(L(1)),
         load={"kv_bits": 8, "kv_group_size": 32}, build={"head_dim": 32}),
    Case("old row overwritten in layer 1", "mimo", "logic", "*.layers.1", f.on_keep(f.old_row_overwritten(1))),
    Case("only after token 200", "llama", "logic", "*.layers.0", f.on_keep(L(1, when=late)), tokens=256),
    Case("only after 60 tokens", "gemma3_text", "logic", "*.layers.1", f.on_keep(L(1, when=wrapped)), tokens=96),
    Case("only on the second reject", "llama", "logic", "*.layers.0", f.on_keep(L(1, when=second))),
    Case("only on full acceptance", "llama", "logic", "*.layers.1", f.on_keep(full_drops_one)),
    Case("ring trimmed in silence", "gemma3_text", "logic", "*.layers.0", f.on_keep(f.ring_silent)),
    Case("ring silent, not full at first", "gemma3_text", "logic", "*.layers.0", f.on_keep(f.ring_silent), prompt=6),
    Case("ring counted back only", "gemma3_text", "logic", "*.layers.0", f.on_keep(f.ring_counted_only)),
    Case("gated-delta state stale", "qwen3_5", "logic", "*.layers.0", f.on_keep(f.recurrent(f.stale))),
    Case("gated-delta not rolled back", "qwen3_5", "logic", "*.layers.0", f.on_keep(f.recurrent(f.not_rolled_back))),
    Case("state stale in layer 2", "qwen3_5", "logic", "*.layers.2", f.on_keep(f.recurrent(f.stale, layers=(2,)))),
    Case("conv window shifted", "qwen3_5", "logic", "*.layers.0", f.on_keep(f.recurrent(f.conv_shifted))),
    Case("EOS cut leaves the cache ahead", "llama", "logic", None, f.eos_ahead, eos=6),
    Case("head cache not trimmed", "mimo", "logic", None, f.drafter_with(_trim=f.no_trim), arms=(DEPTH0, HEAD)),
    Case("head cache of a hybrid not trimmed", "qwen3_5", "logic", None, f.drafter_with(_trim=f.no_trim), arms=(HEAD,)),
    Case("head gets wrong hidden rows", "mimo", "logic", None, f.drafter_with(observe=f.hidden_shifted), arms=(HEAD,)),
    Case("head primed one token off", "mimo", "logic", None, f.drafter_with(prime=f.prime_shifted), arms=(HEAD,)),
    Case("head of two caches not trimmed", "deepseek_v32", "logic", None, f.drafter_with(_trim=f.no_trim),
         arms=(DEPTH0, HEAD)),
    Case("head trims its attention only", "deepseek_v32", "logic", None, f.drafter_with(_trim=f.trim_first_only),
         arms=(HEAD,)),
    Case("head of two caches primed one token off", "deepseek_v32", "logic", None,
         f.drafter_with(prime=f.prime_shifted), arms=(HEAD,)),
    Case("head primed twice", "qwen3_5", "logic", None, f.drafter_with(prime=f.prime_twice), arms=(HEAD,)),
    Case("penalty keeps rejected tokens", "llama", "logic", None, f.penalty_keeps_rejected),
    Case("last prompt token prefetched twice", "llama", "logic", None, f.last_prompt_token_twice),
    Case("a step fed twice", "mimo", "logic", None, f.step_twice(30)),
    Case("correction read from row 0", "llama", "logic", None, model=f.judged(f.first_row_read)),
    Case("ties to the highest id", "llama", "logic", None, model=f.judged(f.highest_id), pairs=0.0),
    Case("choice from bfloat16 logits", "llama", "logic", None, model=f.judged(f.low_precision_choice), pairs=1e-4),
    Case("one draft too many accepted", "qwen3_5", "logic", None, model=f.judged(f.one_too_many)),
    Case("a right draft thrown away", "mimo", "logic", None, model=f.judged(f.one_too_few)),
    Case("rejected draft fed on", "llama", "logic", None, model=f.feeds_rejected),
    Case("gate rows shifted", "qwen3_5", "logic", "*.layers.0.linear_attn.in_proj_a",
         model=b.rows_rolled("language_model.model.layers.0.linear_attn.in_proj_a")),
    Case("gate rows shifted in layer 2", "qwen3_5", "logic", "*.layers.2.linear_attn.in_proj_b",
         model=b.rows_rolled("language_model.model.layers.2.linear_attn.in_proj_b")),
    Case("value rows shifted", "llama", "logic", "*.layers.1.self_attn.v_proj",
         model=b.rows_rolled("model.layers.1.self_attn.v_proj")),
    Case("router rows shifted", "qwen3_moe", "logic", "*.layers.1.mlp.gate",
         model=b.rows_rolled("model.layers.1.mlp.gate")),
    Case("window one key too narrow", "gemma3_text", "logic", "*.layers.0.self_attn", model=b.window_narrow),
    Case("rows of a block see ahead", "llama", "logic", "*.layers.0.self_attn", model=b.sees_ahead),
    Case("stops one token early", "llama", "length", None, f.cap_short),
    Case("EOS unseen inside a block", "llama", "length", None, f.eos_missed, eos=6),
]  # fmt: skip


def positions() -> list[Case]:
    """Cases that need a state of their own each time they run."""
    fault = b.PositionAfterReject()
    return [Case("wrong position after a reject", "llama", "logic", "*.layers.0", fault.tamper, fault.model)]


def simulated(name: str, kind: str, spec: str, where: str, **more: Any) -> Case:
    return Case(name, kind, "numeric", where, spec=spec, **{"pairs": TIES, "tokens": 64} | more)


Q = "*.layers.0.self_attn.?_proj"
WIDE = {"build": {"sliding_window": 128}}  # a window that is never full: the only cause is the simulated one
NUMERIC = [
    simulated("split-K everywhere", "llama", "splitk@*", Q),
    simulated("split-K in layer 1", "mimo", "splitk@layers.1.*", "*.layers.1.self_attn.?_proj"),
    simulated("split-K of an unembedding", "llama", "splitk@lm_head", "lm_head"),
    simulated("split-K of a tied unembedding", "mimo", "splitk@lm_head", "embed_tokens"),
    simulated("split-K in a hybrid", "qwen3_5", "splitk@layers.0.*", "*.layers.0.linear_attn.in_proj_*"),
    simulated("split-K, layers 1 and 2", "llama", "splitk@layers.1.mlp.*,splitk@layers.2.mlp.*", "*.layers.1.mlp.*"),
    simulated("bf16 sums in attention", "llama", "bf16acc:8@self_attn.*", Q),
    simulated("bf16 sums in one MLP", "mimo", "bf16acc:8@layers.2.mlp.*", "*.layers.2.mlp.*"),
    simulated("bf16 sums of an unembedding", "llama", "bf16acc:8@lm_head", "lm_head"),
    simulated("low precision everywhere", "llama", "lowp@*", Q),
    simulated("low precision in a window model", "gemma3_text", "lowp@layers.1.*", "*.layers.1.self_attn.?_proj",
              **WIDE),
    simulated("low precision in a hybrid", "qwen3_5", "lowp@mlp.*", "*.layers.0.mlp.*"),
    simulated("noise 1e-7", "llama", "noise:1e-7@layers.0.*", Q),
    simulated("noise 1e-6", "mimo", "noise:1e-6@layers.1.mlp.*", "*.layers.1.mlp.*"),
    simulated("noise 1e-5", "llama", "noise:1e-5@self_attn.*", Q),
    simulated("noise 1e-4", "qwen3_5", "noise:1e-4@layers.2.*", "*.layers.2.linear_attn.in_proj_*"),
    simulated("noise 1e-3", "mimo", "noise:1e-3@*", Q),
    simulated("noise 1e-2", "llama", "noise:1e-2@layers.1.*", "*.layers.1.self_attn.?_proj"),
    simulated("noise 1e-2 everywhere", "mimo", "noise:1e-2@*", Q),
    simulated("noise 1e-2 of an unembedding", "llama", "noise:1e-2@lm_head", "lm_head"),
    simulated("noise 1e-3 in a window model", "gemma3_text", "noise:1e-3@layers.0.mlp.*", "*.layers.0.mlp.*", **WIDE),
    simulated("router near-ties, another order", "qwen3_moe", "noise:1e-6@self_attn.*", Q, model=b.routers_tied),
    simulated("router near-ties, other experts", "qwen3_moe", "noise:1e-6@self_attn.*", Q, model=b.routers_tied,
              build={"num_experts_per_tok": 3}),
    Case("MLA attention, float32", "deepseek_v3", "numeric", "*.layers.0.self_attn", pairs=TIES, tokens=64),
    Case("MLA attention, bfloat16", "deepseek_v3", "numeric", "*.layers.0.self_attn", pairs=3e-3, tokens=96,
         load={"dtype": "bfloat16"}),
    Case("sliding window, float32", "gemma3_text", "numeric", "*.layers.0.self_attn", pairs=TIES, tokens=64),
    Case("sliding window, one row after a block", "gemma3_text", "numeric", "*.layers.0.self_attn", pairs=3e-3,
         tokens=96, arms=(Candidate("once", "scripted", None, (1,) + (0,) * 96),), load={"dtype": "bfloat16"}),
    Case("sliding window, bfloat16", "gemma3_text", "numeric", "*.layers.0.self_attn", pairs=3e-3, tokens=96,
         load={"dtype": "bfloat16"}),
]  # fmt: skip


def late_overwrite(layer: int, after: int) -> Callable[[Parts], Parts]:
    """An old row is overwritten, but only once the cache holds more than `after` rows."""
    inner = f.old_row_overwritten(layer)

    def change(cache: Any, attempt: Any, n: int, keep: Callable[[int], None]) -> None:
        inner(cache, attempt, n, keep) if cache.length > after else keep(n)

    return f.on_keep(change)


# A fault in the company of rounding: near-ties are left early and explain nothing of what comes after them.
BEHIND = [
    Case("late fault behind near-ties", "llama", "logic", "*.layers.1", late_overwrite(1, 24 + 80), tokens=128,
         pairs=TIES, spec="noise:1e-4@layers.1.mlp.*"),
    Case("off by one under bf16 sums", "llama", "logic", "*.layers.0", f.on_keep(L(1)), pairs=TIES,
         spec="bf16acc:8@self_attn.*"),
    Case("gated-delta state stale under noise", "qwen3_5", "logic", "*.layers.0", f.on_keep(f.recurrent(f.stale)),
         spec="noise:1e-2@*"),
    Case("conv window shifted under noise", "qwen3_5", "logic", "*.layers.0", f.on_keep(f.recurrent(f.conv_shifted)),
         spec="noise:1e-2@*"),
    Case("old row overwritten, MLA in bfloat16", "deepseek_v3", "logic", "*.layers.1",
         f.on_keep(f.old_row_overwritten(1)), pairs=3e-3, load={"dtype": "bfloat16"}),
    Case("ring trimmed in silence, bfloat16", "gemma3_text", "logic", "*.layers.0", f.on_keep(f.ring_silent),
         pairs=3e-3, load={"dtype": "bfloat16"}),
]  # fmt: skip


def cases() -> list[Case]:
    return [*LOGIC, *positions(), *BEHIND, *NUMERIC]


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
            if case.model is not None:
                stack.enter_context(case.model(loaded))
            if case.spec is not None:
                stack.enter_context(numerics.simulate(loaded.target, case.spec))
            found = diagnose(loaded, case.arms, case.prompt, case.tokens, tamper=case.tamper, eos=case.eos)
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


def clean(zoo: Zoo, count: int) -> Iterator[tuple[str, Verdict]]:
    """Runs without any fault: every kind, both float widths where they differ, many prompts and seeds."""
    made = 0
    for round_number in range(count):
        for kind in ("llama", "mimo", "qwen3_5", "gemma3_text"):
            loaded = zoo.load(kind, {}, seed=round_number % 5)
            arms = [SCRIPTED, Candidate("scripted2", "scripted", 2), Candidate("ngram3", "ngram", 3), DEPTH0]
            arms += [HEAD] if loaded.head is not None else []
            found = diagnose(loaded, arms, 6 + 9 * (round_number % 4), 32, seed=100 + round_number)
            for arm, by in found.verdicts.items():
                yield f"{kind} {arm} {round_number}", next(iter(by.values()))
                made += 1
                if made == count:
                    return


def table(outcomes: Iterable[Outcome], clean_runs: Sequence[Verdict]) -> str:
    """Markdown: known cause against verdict, then each case."""
    outcomes = list(outcomes)
    columns = ("equal", "numeric", "logic", "length", "unknown")
    counts = Counter((o.case.verdict, o.verdict) for o in outcomes) + Counter(("none", v.verdict) for v in clean_runs)
    lines = ["| known cause | runs | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for cause in ("none", "numeric", "logic", "length"):
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
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        zoo, outcomes = Zoo(Path(folder)), []
        for case in cases():
            if args.only in case.name:
                outcomes.append(zoo.run(case))
                o = outcomes[-1]
                mark = "ok " if o.right and o.placed is not False else "BAD"
                print(f"{mark} {o.seconds:5.1f}s {case.name}: {o.verdict} ({o.reason}) {o.where}", file=sys.stderr)
        runs = []
        for name, verdict in clean(zoo, args.clean):
            runs.append(verdict)
            if verdict.verdict not in ("equal", "numeric"):
                print(f"BAD clean {name}: {verdict.verdict} ({verdict.reason})", file=sys.stderr)
    print(table(outcomes, runs), end="")
    wrong = [o for o in outcomes if not o.right or o.placed is False]
    return int(bool(wrong or any(v.verdict not in ("equal", "numeric") for v in runs)))


if __name__ == "__main__":
    raise SystemExit(main())
