"""One trial in a fresh process: `python -m mtplab.trials.worker SPEC.json`.

A fresh process has no warm caches, no grown memory and no state of another arm. The parent reads one JSON line per
event from stdout: {"at": n, "of": m} as requests finish, and {"failed": reason, "kind", "code"} if anything goes
wrong. The requests themselves go line by line into the file that the spec names.

Two jobs: "prepare" loads the model once, tokenizes the corpora, tries every arm and measures what passes cost; it
writes one JSON document. "trial" runs one arm on all prompts. The worker ends when its stdin does: a parent that was
killed leaves no orphan behind that writes on.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtplab.errors import MtplabError, RequestError
from mtplab.trials import corpus
from mtplab.trials.files import FULL, dumps, sentence, write_text
from mtplab.trials.plan import Plan

WARM_UP_TOKENS = 48
LOAD_OPTIONS = (
    "kv_bits", "kv_group_size", "max_kv_size", "dtype", "recursion", "hidden", "head_norms", "assistant",
    "trust_remote_code",
)  # fmt: skip
OF_THE_HEAD = ("recursion", "hidden", "head_norms")


def say(event: dict[str, Any]) -> None:
    """One event for the parent. A parent that no longer listens is no reason to fail here."""
    with suppress(BrokenPipeError):
        print(dumps(event), flush=True)


def prepare(spec: dict[str, Any]) -> None:
    """Everything that must be known, and may go wrong, before the first trial; written to spec["out"]."""
    plan = Plan.from_json(spec["plan"])
    from mtplab import backend

    info = backend.setup()
    from mtplab.backend import machine
    from mtplab.trials import arms

    parsed = [arms.parse_arm(name) for name in plan.arms]
    if plan.head_folder is not None and not any(arm.needs_head for arm in parsed):
        raise RequestError(f"no arm needs the head in {plan.head_folder}; add depth1 or adaptive, or drop --head")
    loaded = load(plan, plan.arms)
    say({"stage": "cutting prompts"})
    prompts, notices = corpus.load_corpora(
        plan.corpora,
        loaded.tokenizer,
        prompts=plan.prompts,
        prompt_tokens=plan.prompt_tokens,
        room=plan.max_tokens,
        context=loaded.context,
    )
    say({"stage": "trying every arm"})
    effective = {arm.name: try_arm(arm, plan, loaded, prompts[0]) for arm in parsed}
    say({"stage": "measuring what a pass costs"})
    result = {
        "prompts": [p.to_json() for p in prompts],
        "notices": notices + ([info.notice] if info.notice else []),
        "costs": measure(parsed, plan, loaded),
        "machine": machine.facts(),
        "model": loaded.facts,
        "files": files_of(plan, loaded),
        "effective": effective,
    }
    write_text(Path(spec["out"]), dumps(result))


def try_arm(arm: Any, plan: Plan, loaded: Any, prompt: corpus.Prompt) -> dict[str, Any]:
    """A few tokens through an arm: what it cannot honour stops the run now, with its reason.

    Any other error is a fault, not a wrong request; it will show as failed trials while the other arms run.
    """
    from mtplab.trials import arms

    live = arms.Session(loaded, arm, **arm_options(plan))
    few = replace(settings(plan, plan.modes[0], 0), max_tokens=4)
    try:
        live.request(prompt.tokens[-8:], request=0, settings=few)
    except MtplabError:
        raise
    except Exception as error:
        say({"stage": f"arm {arm.name} is at fault ({type(error).__name__})"})
    return live.effective


def measure(parsed: list[Any], plan: Plan, loaded: Any) -> dict[str, Any]:
    """Costs per pass with a cache about as long as in the middle of a request."""
    from mtplab.trials import arms

    depths = [arm.depth or 0 for arm in parsed]
    rows = min(plan.prompt_tokens + plan.max_tokens // 2, loaded.context - 16)
    deepest = max([arms.ADAPTIVE_DEPTH, *depths])
    return arms.calibrate(loaded, deepest, rows=max(1, rows), verify=plan.verify, width=arms.fixed_width(parsed))


def files_of(plan: Plan, loaded: Any) -> dict[str, int]:
    """`file_sizes` of the checkpoint and of a head in its own folder, whether or not this trial's arm needs it."""
    from mtplab.models.headfile import INSIDE

    place = loaded.folder / INSIDE if plan.head_folder is None else Path(plan.head_folder).expanduser()
    own = file_sizes(place) if place.is_dir() else {}
    return file_sizes(loaded.folder) | {f"head/{name}": size for name, size in own.items()}


def file_sizes(folder: Path) -> dict[str, int]:
    """Name and bytes of the checkpoint's files: a resume on other weights is found out."""
    return {p.name: p.stat().st_size for p in sorted(folder.iterdir()) if p.suffix in (".json", ".safetensors")}


def load(plan: Plan, names: Iterable[str]) -> Any:
    """The loaded model under the plan's options, with its head only if one of the arms needs it; the BLAS was chosen
    before (`backend.setup`)."""
    from mtplab.models import load_target
    from mtplab.trials import arms

    needed = any(arms.parse_arm(name).needs_head for name in names)
    options = {k: getattr(plan, k) for k in LOAD_OPTIONS}
    if needed:
        return load_target(plan.model, head="require", head_folder=plan.head_folder, **options)
    if any(arms.parse_arm(name).needs_head for name in plan.arms):
        # They were asked for the other arms' head, which may be of a family that this trunk is not.
        options |= dict.fromkeys(OF_THE_HEAD)
    return load_target(plan.model, head="none", **options)


def arm_options(plan: Plan) -> dict[str, Any]:
    from mtplab.trials import arms

    width = arms.fixed_width([arms.parse_arm(name) for name in plan.arms])
    return {"history": plan.history, "prime": plan.prime, "drafts": plan.drafts, "verify": plan.verify, "width": width}


def settings(plan: Plan, mode: str, round_number: int) -> Any:
    """A mode's decoder settings. Sampled rounds draw anew (the seed moves with the round); greedy ones repeat."""
    from mtplab.decode.settings import Settings

    common = {
        "max_tokens": plan.max_tokens,
        "ignore_eos": plan.ignore_eos,
        "prefill_step": plan.prefill_step_size,
        "seed": plan.seed,
    }
    if mode == "greedy":
        return Settings(**common)
    sampling = {"temp": plan.temp, "top_p": plan.top_p, "top_k": plan.top_k, "seed": plan.seed + round_number}
    return Settings(**common | sampling)


def trial(spec: dict[str, Any]) -> None:
    """Run one arm on all prompts; each finished request is one flushed line of spec["out"]."""
    plan, prompts = Plan.from_json(spec["plan"]), [corpus.Prompt.from_json(p) for p in spec["prompts"]]
    from mtplab import backend

    info = backend.setup()
    import mlx.core as mx

    from mtplab.backend import machine

    loaded = load(plan, [spec["arm"]])
    made = runs(spec, plan, loaded, prompts, warm_up(spec, plan, loaded, prompts[0]))
    mx.reset_peak_memory()
    began, count, total = time.perf_counter(), 0, len(prompts) * len(plan.modes)
    with open(spec["out"], "w", encoding="utf-8") as file, backend.LoadSampler() as sampler:
        for request in made:
            line = {"request": request.to_json(), "pieces": pieces(loaded.tokenizer, request.tokens)}
            file.write(dumps(line) + "\n")
            file.flush()
            count += 1
            say({"at": count, "of": total})
        sampler.stop()
        done = {
            "arm": spec["arm"],
            "round": spec["round"],
            "requests": count,
            "wall_s": time.perf_counter() - began,
            "load": sampler.summary(),
            "peak_memory_bytes": int(mx.get_peak_memory()),
            "effective": session(spec, plan, loaded).effective,
            "blas": dataclasses.asdict(info),
            "machine": machine.facts(),
            "files": files_of(plan, loaded),
        }
        file.write(dumps({"done": done}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def pieces(tokenizer: Any, tokens: tuple[int, ...]) -> list[str]:
    """The text each token completes, as a stream shows it; joined they are the output."""
    stream = tokenizer.stream()
    made = [stream.add(t) for t in tokens]
    return [*made[:-1], made[-1] + stream.flush()]


def session(spec: dict[str, Any], plan: Plan, loaded: Any) -> Any:
    """A fresh session of the trial's arm; the adaptive policy starts from the measured costs."""
    from mtplab.trials import arms

    return arms.Session(loaded, arms.parse_arm(spec["arm"]), costs_ns=arms.costs_ns(spec["costs"]), **arm_options(plan))


def warm_up(spec: dict[str, Any], plan: Plan, loaded: Any, prompt: corpus.Prompt) -> Any:
    """One request in a session of its own, of which nothing is counted. Of the session only what it learned of the
    machine is used on: what a pass costs, not what this text accepted."""
    first = settings(plan, plan.modes[0], 0)
    few = replace(first, max_tokens=min(first.max_tokens, WARM_UP_TOKENS))
    live = session(spec, plan, loaded)
    live.request(prompt.tokens, request=0, settings=few)
    return live


def runs(spec: dict[str, Any], plan: Plan, loaded: Any, prompts: list[corpus.Prompt], before: Any) -> Iterator[Any]:
    """Every prompt in every mode. One session per mode and corpus, so that no text tunes the policy of another; what
    passes cost on this machine is carried from the session before."""
    for mode in plan.modes:
        chosen = settings(plan, mode, spec["round"])
        for name in dict.fromkeys(p.corpus for p in prompts):
            live = session(spec, plan, loaded)
            live.knows_costs_of(before)
            before = live
            for number, prompt in enumerate(prompts):
                if prompt.corpus == name:
                    request = live.request(
                        prompt.tokens, request=number, settings=chosen, id=prompt.id, corpus=prompt.corpus
                    )
                    extra = {"arm": spec["arm"], "round": spec["round"], "mode": mode}
                    yield replace(request, settings={**request.settings, **extra})


def failure(error: BaseException, out: str) -> dict[str, Any]:
    """An exception as the event that the parent stores: one sentence, its kind, the exit code it asks for."""
    kind = type(error).__name__
    if isinstance(error, MtplabError):
        return {"failed": str(error), "kind": kind, "code": error.code}
    if isinstance(error, OSError) and error.errno in FULL:
        return {"failed": sentence(error, out), "kind": errno.errorcode[error.errno], "code": 2}
    text = " ".join(str(error).split()) or "no message"
    return {"failed": f"{kind}: {text[:500]}", "kind": kind, "code": 4}


def _end_with_parent() -> None:
    """Leave at once when stdin ends, which it does when the parent is gone in any way."""

    def watch() -> None:
        with suppress(OSError, ValueError):
            while os.read(0, 4096):
                pass
        os._exit(130)

    threading.Thread(target=watch, name="mtplab-parent", daemon=True).start()


JOBS = {"prepare": prepare, "trial": trial}


def main(argv: list[str], jobs: Any = JOBS) -> int:
    """Entry of the process; `jobs`: name -> function of the spec. Returns the failure's exit code, or 0."""
    # Ctrl-C reaches the whole process group; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    spec = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    try:
        jobs[spec["job"]](spec)
    except Exception as error:
        if spec.get("debug"):
            import traceback

            traceback.print_exc()
        event = failure(error, spec["out"])
        say(event)
        return event["code"]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
