"""Do the exact ways of verifying keep their promise? Tokens, and logits bit for bit, over many prompts.

    python benchmarks/exact_equality.py --prompts 100 --max-tokens 256
    python benchmarks/exact_equality.py --simulate 'splitk@*'

Every way decodes every prompt: `rowwise` and `serial` against one-token decoding, `fixed` against one-token decoding
at the fixed width, and `batched` against one-token decoding to show that there was something to get wrong. Compared
are the tokens, and the logits of every position that was committed. No times are taken. The last line is one JSON
document; the exit code is 1 where an exact way broke its promise.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from typing import Any

import common

PROMISES = {"batched": "baseline", "rowwise": "baseline", "serial": "baseline", "fixed": "baseline_fixed"}


class Recorder:
    """A way of verifying that keeps the logits of the rows it was fed, by position."""

    def __init__(self, way: Any):
        self.way, self.rows = way, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.way, name)

    def forward(self, tokens: Any, cache: Any) -> Any:
        out = self.way.forward(tokens, cache)
        for i in range(out.logits.shape[0]):
            self.rows[cache.length - out.logits.shape[0] + i] = out.logits[i]
        return out


def decode(loaded: Any, name: str, way: str, prompt: list[int], args: argparse.Namespace) -> tuple[list[int], dict]:
    """Tokens, and position -> logits of the rows that stayed, of one arm."""
    from mtplab.decode.settings import Settings
    from mtplab.trials.arms import Session, parse_arm

    session = Session(loaded, parse_arm(name), verify=way, width=args.depth + 1)
    session.verifier = seen = Recorder(session.verifier)
    settings = Settings(max_tokens=args.max_tokens, ignore_eos=True)
    tokens = list(session.request(prompt, request=0, settings=settings).tokens)
    last = len(prompt) + args.max_tokens - 1
    return tokens, {p: row for p, row in seen.rows.items() if len(prompt) <= p < last}


def compare(args: argparse.Namespace, loaded: Any, texts: list[list[int]]) -> dict[str, dict[str, int]]:
    import mlx.core as mx

    arm = f"{'ngram' if loaded.head is None else 'depth'}{args.depth}"
    table = {way: {"prompts": 0, "tokens_equal": 0, "rows": 0, "rows_equal": 0} for way in args.ways}
    for n, prompt in enumerate(texts):
        base = {"baseline": decode(loaded, "baseline", "batched", prompt, args)}
        if "fixed" in args.ways:
            base["baseline_fixed"] = decode(loaded, "baseline", "fixed", prompt, args)
        for way in args.ways:
            tokens, rows = decode(loaded, arm, way, prompt, args)
            wanted_tokens, wanted = base[PROMISES[way]]
            same = [mx.array_equal(rows[p].view(mx.uint32), wanted[p].view(mx.uint32)) for p in wanted if p in rows]
            row = table[way]
            row["prompts"] += 1
            row["tokens_equal"] += tokens == wanted_tokens
            row["rows"] += len(wanted)
            row["rows_equal"] += sum(s.item() for s in same)
        common.progress(f"prompt {n + 1} of {len(texts)}: {'; '.join(_line(way, row) for way, row in table.items())}")
    return table


def _line(way: str, row: dict[str, int]) -> str:
    prompts, rows = (f"{row[f'{k}_equal']} of {row[n]}" for k, n in (("tokens", "prompts"), ("rows", "rows")))
    return f"{way}: tokens equal on {prompts} prompts, logits on {rows} rows"


def texts_of(loaded: Any, args: argparse.Namespace) -> list[list[int]]:
    """`--prompts` pieces of `--prompt-tokens` tokens, spread over both bundled corpora."""
    pieces = []
    for corpus in ("novel", "c"):
        lines = (common.ROOT / "mtplab" / "data" / "corpora" / f"{corpus}.jsonl").read_text(encoding="utf-8")
        ids = [t for line in lines.splitlines() for t in loaded.tokenizer.encode(json.loads(line)["text"])]
        count = (args.prompts + (corpus == "novel")) // 2
        step = max(1, (len(ids) - args.prompt_tokens) // max(1, count))
        pieces += [ids[i * step : i * step + args.prompt_tokens] for i in range(count)]
    return pieces


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab-mtp", help="a bundled model or a checkpoint folder (default: lab-mtp)")
    parser.add_argument("--prompts", type=common.positive, default=100, help="default 100")
    parser.add_argument("--prompt-tokens", type=common.positive, default=32, help="default 32")
    parser.add_argument("--max-tokens", type=common.positive, default=256, help="default 256")
    parser.add_argument("--depth", type=common.positive, default=3, help="default 3")
    parser.add_argument("--ways", nargs="+", choices=list(PROMISES), default=["batched", "rowwise", "fixed"])
    parser.add_argument("--simulate", help="simulated numerics in force, e.g. splitk@*")
    args = parser.parse_args()
    from mtplab import backend
    from mtplab.errors import MtplabError

    try:
        backend.setup()
        from mtplab.backend import numerics
        from mtplab.models import load_target

        loaded = load_target(common.model_folder(args.model), head="auto")
        with nullcontext() if args.simulate is None else numerics.simulate(loaded.target, args.simulate):
            table = compare(args, loaded, texts_of(loaded, args))
    except MtplabError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.code
    for way, row in table.items():
        print(f"{_line(way, row)}, against {PROMISES[way]}")
    print(
        json.dumps({"benchmark": "exact_equality", "settings": vars(args), "machine": backend.facts(), "ways": table})
    )
    return int(any(row["rows_equal"] < row["rows"] for way, row in table.items() if way != "batched"))


if __name__ == "__main__":
    raise SystemExit(main())
