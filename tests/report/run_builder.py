"""Run folders written by hand: scripted passes and times, no model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtplab.records.types import Prefill, Request, Verify
from mtplab.trials.corpus import Prompt
from mtplab.trials.files import dumps
from mtplab.trials.plan import Plan, order
from mtplab.trials.store import Store, create

MS = 1_000_000


def request(
    prompt: str,
    corpus: str,
    passes: Sequence[tuple[int, int]],
    *,
    pass_ms: float,
    settings: dict,
    tokens: Sequence[int] | None = None,
) -> Request:
    """passes: (proposed, accepted). Token i of the text is i, or tokens[i]."""
    now, position, made, count = 10 * MS, 1, [], 1 + sum(a + 1 for _, a in passes)
    text = list(tokens or range(count))
    for index, (proposed, accepted) in enumerate(passes):
        end = now + round(pass_ms * MS)
        out = tuple(text[position : position + accepted + 1])
        cut = "cap" if index == len(passes) - 1 else None
        drafts = (*out[:accepted], *(-1 for _ in range(proposed - accepted)))
        made.append(
            Verify(index, position, proposed, proposed, accepted, accepted + 1, cut, 0, 0, drafts, out, now, end)
        )
        now, position = end, position + accepted + 1
    return Request(prompt, corpus, Prefill(4, 0, 2048, 1, 1, text[0], None, 0, 10 * MS), tuple(made), "cap", settings)


# arm -> (passes of one request, milliseconds a pass)
ARMS = {
    "baseline": ([(0, 0)] * 24, 10.0),
    "depth0": ([(0, 0)] * 24, 10.0),
    "depth3": ([(3, 3), (3, 1), (3, 0), (3, 3), (3, 3), (3, 3), (3, 1), (3, 0)], 13.0),
    "adaptive": ([(3, 3), (3, 3), (1, 1), (0, 0), (3, 3), (3, 3), (0, 0), (3, 3)], 12.0),
}


def build(
    folder: Path,
    *,
    arms: dict | None = None,
    corpora: Sequence[str] = ("novel", "c"),
    rounds: int = 3,
    prompts: int = 6,
    modes: Sequence[str] = ("greedy", "sampled"),
    changed: dict | None = None,
    text: str = "Once upon a time ",
    pieces: str = "w ",
    model: str = "tiny",
    skip: Sequence[str] = (),
) -> Store:
    """A complete run, but for the trials named in `skip`. changed: (arm, corpus) -> passes, ms, and tokens."""
    arms = arms or ARMS
    plan = Plan(
        model=model, corpora=tuple(corpora), arms=tuple(arms), rounds=rounds, prompts=prompts, modes=tuple(modes)
    )
    made = [Prompt(f"{c}/{i}", c, (1, 2, 3, 4), text) for c in corpora for i in range(prompts)]
    costs = {
        "verify_ms": {m: 9 + m for m in range(1, 10)},
        "draft_ms": {k: float(k) for k in range(1, 9)},
        "host_ms": 0.0,
    }
    machine = {"os": "Linux", "cpu": "test", "cores": 2, "mlx": "0"}
    store = create(folder, plan, prompts=made, manifest={"machine": machine, "model": {"model": model}}, costs=costs)
    for trial in order(plan):
        if trial.name in skip:
            store.fail(trial, {"reason": "it <b>broke</b>", "kind": "crash"})
            continue
        lines = []
        for mode in modes:
            for p in made:
                passes, ms, *tokens = (changed or {}).get((trial.arm, p.corpus), arms[trial.arm])
                ms *= 1 + 0.003 * (trial.round % 2) + 0.001 * int(p.id.split("/")[1])
                settings = {"arm": trial.arm, "round": trial.round, "mode": mode, "seed": trial.round}
                made_request = request(
                    p.id, p.corpus, passes, pass_ms=ms, settings=settings, tokens=tokens[0] if tokens else None
                )
                lines.append({"request": made_request.to_json(), "pieces": [pieces] * len(made_request.tokens)})
        lines.append({"done": {"load": {"disturbed": False}}})
        store.path(trial).write_text("".join(dumps(x) + "\n" for x in lines))
    return store
