"""One trial of `denoise` in a fresh process: `python -m mtplab.trials.canvas_worker SPEC.json`.

The contract is that of `mtplab.trials.worker`: events on stdout, requests line by line into the spec's file, the last
line what the process says of itself. Scoring comes after each request and is in no time.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtplab.errors import RequestError
from mtplab.trials import corpus, worker
from mtplab.trials.canvas_plan import DenoisePlan
from mtplab.trials.files import dumps, write_text

COMMAND = (sys.executable, "-P", "-m", "mtplab.trials.canvas_worker")


def settings(plan: DenoisePlan, round_number: int, max_tokens: int) -> Any:
    """A round is a seed: its arms share every starting canvas."""
    from mtplab.decode.settings import Settings

    return Settings(
        max_tokens=max_tokens,
        ignore_eos=plan.ignore_eos,
        prefill_step=plan.prefill_step_size,
        seed=plan.seed + round_number,
    )


def load(plan: DenoisePlan) -> Any:
    from mtplab.models.canvas import load_denoiser

    return load_denoiser(plan.model, dtype=plan.dtype)


def prepare(spec: dict[str, Any]) -> None:
    """Everything that must be known, and may go wrong, before the first trial; written to spec["out"]."""
    plan = DenoisePlan.from_json(spec["plan"])
    from mtplab import backend

    info = backend.setup()
    from mtplab.backend import machine
    from mtplab.trials.canvas_arms import Scorer, Session

    denoiser = load(plan)
    sessions = {arm: Session(denoiser, plan.asked(arm), max_tokens=plan.max_tokens) for arm in plan.arms}
    _refuse_equals(sessions)
    # Whole canvases: the longest one does not always need the most positions.
    room = max(s.positions(s.max_tokens) for s in sessions.values())
    for s in sessions.values():
        s.check_room(1, s.max_tokens)
    worker.say({"stage": "cutting prompts"})
    prompts, notices = corpus.load_corpora(
        plan.corpora,
        denoiser.tokenizer,
        prompts=plan.prompts,
        prompt_tokens=plan.prompt_tokens,
        room=room,
        context=denoiser.context,
    )
    worker.say({"stage": "trying every arm"})
    scorer = Scorer(plan.scorer, denoiser)
    for prompt in prompts:
        scorer.check_room(prompt.tokens, max(s.max_tokens for s in sessions.values()))
    for arm, session in sessions.items():
        tokens = prompts[0].tokens[-8:]
        made = session.request(tokens, request=0, settings=settings(plan, 0, 1))
        if arm == plan.arms[0]:
            scorer.score(tokens, made)
    result = {
        "prompts": [p.to_json() for p in prompts],
        "notices": notices + ([info.notice] if info.notice else []),
        "costs": {},
        "machine": machine.facts(),
        "model": denoiser.facts,
        "files": worker.file_sizes(denoiser.folder),
        "effective": {arm: s.effective for arm, s in sessions.items()},
    }
    write_text(Path(spec["out"]), dumps(result))


def _refuse_equals(sessions: dict[str, Any]) -> None:
    """Two arms that mean the same would be one row with twice the requests."""
    seen: dict[Any, str] = {}
    for arm, session in sessions.items():
        if session.policy in seen:
            same = ", ".join(str(session.effective[k]) for k in ("steps", "sampler", "canvas"))
            raise RequestError(f"the arms {seen[session.policy]} and {arm} mean the same here ({same}); drop one")
        seen[session.policy] = arm


def trial(spec: dict[str, Any]) -> None:
    """Run one arm with one seed on all prompts; each finished request is one flushed line of spec["out"]."""
    plan, prompts = DenoisePlan.from_json(spec["plan"]), [corpus.Prompt.from_json(p) for p in spec["prompts"]]
    from mtplab import backend

    info = backend.setup()
    import mlx.core as mx

    from mtplab.backend import machine
    from mtplab.trials.canvas_arms import Scorer, Session

    denoiser = load(plan)
    session = Session(denoiser, plan.asked(spec["arm"]), max_tokens=plan.max_tokens)
    scorer, chosen = Scorer(plan.scorer, denoiser), settings(plan, spec["round"], session.max_tokens)
    extra = {"arm": spec["arm"], "round": spec["round"]}
    # One canvas that leaves nothing behind: first passes cost more.
    session.request(prompts[0].tokens, request=0, settings=replace(chosen, max_tokens=1))
    mx.reset_peak_memory()
    began = time.perf_counter()
    with open(spec["out"], "w", encoding="utf-8") as file, backend.LoadSampler() as sampler:
        for number, prompt in enumerate(prompts):
            made = session.request(prompt.tokens, request=number, settings=chosen, id=prompt.id, corpus=prompt.corpus)
            made = scorer.score(prompt.tokens, replace(made, settings={**made.settings, **extra})).compact()
            line = {"request": made.to_json(), "pieces": worker.pieces(denoiser.tokenizer, made.tokens)}
            file.write(dumps(line) + "\n")
            file.flush()
            worker.say({"at": number + 1, "of": len(prompts)})
        sampler.stop()
        done = {
            "arm": spec["arm"],
            "round": spec["round"],
            "requests": len(prompts),
            "wall_s": time.perf_counter() - began,
            "load": sampler.summary(),
            "peak_memory_bytes": int(mx.get_peak_memory()),
            "effective": session.effective,
            "blas": dataclasses.asdict(info),
            "machine": machine.facts(),
            "files": worker.file_sizes(denoiser.folder),
        }
        file.write(dumps({"done": done}) + "\n")
        file.flush()
        os.fsync(file.fileno())


JOBS = {"prepare": prepare, "trial": trial}

if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1:], JOBS))
