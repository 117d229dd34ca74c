"""A worker without a model: keeps the real one's contract and misbehaves on command.

FAKE is a JSON object: trial name, arm name or "prepare" -> behaviour. "ok" is the default.
FAKE_LOG names a file to which every start appends one line.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path

from mtplab.records.types import Prefill, Request, Verify

BLAS = {"kind": "reference", "name": "none", "version": "1", "threads": 1}
MS = 1_000_000


def request(prompt: dict, arm: str, round_number: int, mode: str, tokens: int) -> Request:
    """Every arm says the same; depthK accepts all K drafts in one pass of 1.5 ms, a plain pass takes 1 ms."""
    depth = int(arm[5:]) if arm.startswith("depth") else 0
    now, position, passes = 2 * MS, 1, []
    while position < tokens:
        emitted = min(depth + 1, tokens - position)
        took = (2 if depth else 1) * MS
        drafts = tuple(range(position, position + depth))
        text = (*drafts, position + depth)
        cut = "cap" if position + emitted == tokens else None
        passes.append(
            Verify(len(passes), position, depth, depth, depth, emitted, cut, 0, 0, drafts, text, now, now + took)
        )
        position, now = position + emitted, now + took
    prefill = Prefill(len(prompt["tokens"]), 0, 2048, 1, 1, 0, "cap" if tokens == 1 else None, 0, 2 * MS)
    settings = {"arm": arm, "round": round_number, "mode": mode, "temp": 0.8 if mode == "sampled" else 0.0}
    return Request(prompt["id"], prompt["corpus"], prefill, tuple(passes), "cap", settings)


def prepare(spec: dict) -> None:
    plan, prompts = spec["plan"], []
    for path in plan["corpora"]:
        words = Path(path).read_text().split()[: plan["prompts"]]
        prompts += [
            {"id": f"{Path(path).stem}/{w}", "corpus": Path(path).stem, "text": w, "tokens": [len(w)]} for w in words
        ]
    made = {
        "prompts": prompts,
        "notices": [],
        "costs": {"verify_ms": dict.fromkeys(range(1, 6), 1.0), "draft_ms": {1: 0.5, 2: 0.5, 3: 0.5}, "host_ms": 0},
        "machine": {"os": "test", "cores": 2, "blas": BLAS},
        "model": {"model": plan["model"]},
        "files": {"config.json": 2},
        "effective": {},
    }  # fmt: skip
    Path(spec["out"]).write_text(json.dumps(made))


def trial(spec: dict, how: str) -> None:
    plan, lines = spec["plan"], []
    for mode in plan["modes"]:
        for prompt in spec["prompts"]:
            made = request(prompt, spec["arm"], spec["round"], mode, plan["max_tokens"])
            lines.append({"request": made.to_json(), "pieces": [f"{t} " for t in made.tokens]})
    with open(spec["out"], "w") as file:
        for n, line in enumerate(lines, 1):
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(json.dumps({"at": n, "of": len(lines)}), flush=True)
            if how in HALF_WAY:
                HALF_WAY[how]()
        if how == "short":
            return
        load = {"alive": True, "disturbed": how == "disturbed", "other_mean": 0.5}
        blas = BLAS | ({"version": "2"} if how == "other-blas" else {})
        done = {"arm": spec["arm"], "round": spec["round"], "load": load, "blas": blas, "files": {"config.json": 2}}
        file.write(json.dumps({"done": done}) + "\n")


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


HALF_WAY = {
    "hang": sys.stdin.read,  # until the parent is gone, as the real one
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "full": full,
    "fault": lambda: 1 / 0,
}


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    name = "prepare" if spec["job"] == "prepare" else f"{spec['arm']}-{spec['round']}"
    if log := os.environ.get("FAKE_LOG"):
        with open(log, "a") as file:
            file.write(name + "\n")
    rules = json.loads(os.environ.get("FAKE", "{}"))
    how = rules.get(name, rules.get(spec.get("arm"), "ok"))
    print("a library says hello")
    try:
        if how.startswith("error:"):
            from mtplab import errors

            raise getattr(errors, how.split(":")[1])("depth1 needs an MTP head")
        trial(spec, how) if spec["job"] == "trial" else prepare(spec)
    except Exception as error:
        from mtplab.trials.worker import failure, say

        event = failure(error, spec["out"])
        say(event)
        return event["code"]
    return 0


if __name__ == "__main__":
    sys.exit(main())
