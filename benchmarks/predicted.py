"""Is the cost model true? The measured `tpot_ratio` of each depth against its `predicted_ratio`.

    predicted_ratio = tokens_per_verify / (draft cost + verify cost + host time), all over the baseline's step

The costs come from `mtplab.trials.arms.calibrate`, in a process of its own, on another text; the counts come from the
run. If the two ratios agree within 5 %, the ratio is explained: what an arm gains is its accepted tokens, what it loses
is those three costs, and nothing else is at work. Where they differ, `pass_ms` shows which depth costs more than the
model says.

Measured / predicted is taken within a round, from the calibration of that same round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import common

WITHIN = 0.05


def options() -> argparse.ArgumentParser:
    parser = common.options(__doc__, rounds=8, prompts=6)
    parser.add_argument("--depths", type=common.positive, nargs="+", default=[1, 2, 3], help="default 1 2 3")
    return parser


def sides(args: argparse.Namespace) -> list[str]:
    return ["calibrate", "baseline", *(f"depth{k}" for k in args.depths)]


def measure(args: argparse.Namespace, side: str) -> common.Row:
    from mtplab.decode.settings import Settings
    from mtplab.models import load_target
    from mtplab.trials.arms import Session, calibrate, parse_arm

    loaded = load_target(common.model_folder(args.model), head="require")
    if side == "calibrate":
        # The cache of the calibration holds as many rows as the runs hold on average.
        return {"costs": calibrate(loaded, max(args.depths), rows=args.prompt_tokens + args.max_tokens // 2)}
    session, settings = Session(loaded, parse_arm(side)), Settings(max_tokens=args.max_tokens, ignore_eos=True)
    texts = common.prompts(args, loaded.tokenizer)
    session.request(texts[0], request=0, settings=settings)
    runs = [session.request(t, request=0, settings=settings, id=str(i)) for i, t in enumerate(texts)]
    return {"requests": [r.to_json() for r in runs]}


def one_round(rows: common.Round, arm: str) -> dict[str, float | None]:
    """Measured and predicted ratio of one arm in one round, its counts, and the time of its passes."""
    from mtplab.records import metrics
    from mtplab.records.types import Request

    base, runs = ([Request.from_json(d) for d in rows[side]["requests"]] for side in ("baseline", arm))
    costs, k = rows["calibrate"]["costs"], arm.removeprefix("depth")
    measured, predicted = metrics.tpot_ratio(base, runs), metrics.predicted_ratio_of(runs, costs)
    passes = [v.pass_ns / 1e6 for r in runs for v in r.verifies if v.proposed == int(k)]
    return {
        "measured": measured,
        "predicted": predicted,
        "measured_over_predicted": measured / predicted if measured and predicted else None,
        "tokens_per_verify": metrics.tokens_per_verify(runs),
        "pass_ms": statistics.median(passes) if passes else None,
        "pass_ms_predicted": _at(costs["verify_ms"], int(k) + 1) + _at(costs["draft_ms"], k) + costs["host_ms"],
    }


def _at(table: Mapping[str, float], key: Any) -> float:
    return table[str(key)]  # JSON made the keys strings


def extra(args: argparse.Namespace, rounds: Sequence[common.Round]) -> dict[str, Any]:
    out: dict[str, Any] = {"sides": {}, "ratios": [], "costs": [r["calibrate"]["costs"] for r in rounds]}
    for arm in (f"depth{k}" for k in args.depths):
        found = [one_round(r, arm) for r in rounds]
        out["sides"][arm] = {k: _median(f[k] for f in found) for k in found[0]}
        values = [f["measured_over_predicted"] for f in found if f["measured_over_predicted"] is not None]
        out["ratios"].append(common.judged(f"{arm}, measured / predicted ratio", values, "within", WITHIN))
    return out


def _median(values: Any) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


if __name__ == "__main__":
    raise SystemExit(common.main(options(), sides, measure, extra=extra))
