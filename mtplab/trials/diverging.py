"""`mtplab diverge` put together: model, prompts and arms by name, the diagnosis, one document."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtplab.decode.settings import check_depth, check_drafting
from mtplab.diagnose.candidates import Candidate
from mtplab.errors import RequestError
from mtplab.models.loader import Loaded
from mtplab.trials import corpus
from mtplab.trials.arms import parse_arm

WITH_HEAD = ("depth0", "depth1", "depth2", "depth3", "adaptive", "scripted3")
WITHOUT_HEAD = ("depth0", "ngram3", "scripted3")
CORPORA = ("novel", "c")
PROMPTS, PROMPT_TOKENS = 4, 96


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for. `arms` empty: all that the model allows."""

    model: str = "lab-mtp"
    arms: tuple[str, ...] = ()
    corpora: tuple[str, ...] = ()
    prompt: str | None = None
    prompts: int | None = None  # per corpus; None: not asked for, PROMPTS
    prompt_tokens: int | None = None  # None: PROMPT_TOKENS
    max_tokens: int = 256
    prefill_step: int = 2048
    ignore_eos: bool = True
    history: str | None = None  # None: not asked for
    prime: bool | None = None
    simulate: str | None = None
    explain: bool = True
    load: dict[str, Any] = field(default_factory=dict)

    @property
    def drafting(self) -> dict[str, Any]:
        """What was asked of the head's drafting."""
        return {k: v for k, v in (("history", self.history), ("prime", self.prime)) if v is not None}


def candidate(name: str, *, history: str = "verified", prime: bool = True) -> Candidate:
    """An arm of the other verbs, or `scriptedN`: N drafts from the baseline's own text, every acceptance in turn."""
    if match := re.fullmatch(r"scripted(0|[1-9]\d*)", name):
        depth = check_depth(int(match[1]))
        if depth == 0:
            raise RequestError("arm scripted0 drafts nothing; that is depth0")
        return Candidate(name, "scripted", depth)
    if name == "baseline":
        raise RequestError("arm baseline is what the others are compared with; it always runs twice, so leave it out")
    try:
        arm = parse_arm(name)
    except RequestError as error:
        raise RequestError(f"{error}, and scripted1..8 here") from None
    return Candidate(name, arm.drafter, arm.depth, None, history, prime)


def arm_names(given: Sequence[str]) -> tuple[str, ...]:
    """Comma lists and repeats as one list; a name twice is an error."""
    names = [n.strip() for text in given for n in text.split(",") if n.strip()]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"arm {name!r} is given twice; once is enough")
    return tuple(names)


def diverge(wanted: Wanted, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Load, run and diagnose; the document of `diagnose.summary` with the model's facts. After `backend.setup`."""
    for name, value in _cut(wanted):
        if value is not None and value < 1:
            raise RequestError(f"--{name} {value} is out of range; use 1 or more")
    arms = [candidate(n, **wanted.drafting) for n in wanted.arms]
    needs = any(a.drafter == "mtp" for a in arms)
    check_drafting(wanted.drafting, head=needs or not arms)
    from mtplab.models import load_target

    loaded = load_target(wanted.model, head="require" if needs else "none" if arms else "auto", **wanted.load)
    if not arms:
        names = WITH_HEAD if loaded.head is not None else WITHOUT_HEAD
        check_drafting(wanted.drafting, head=loaded.head is not None)
        arms = [candidate(n, **wanted.drafting) for n in names]
    texts, notices = _texts(wanted, loaded)
    found = _diagnose(wanted, loaded, arms, texts, say)
    return found | {"model": loaded.facts, "notices": notices, "settings": _effective(wanted, arms, texts)}


def _cut(wanted: Wanted) -> tuple[tuple[str, int | None], ...]:
    """What was asked of the prompts cut from a corpus, by its flag."""
    return ("prompts", wanted.prompts), ("prompt-tokens", wanted.prompt_tokens)


def _texts(wanted: Wanted, loaded: Loaded) -> tuple[list[Any], list[str]]:
    from mtplab.diagnose.diverge import Text

    if wanted.prompt is not None:
        if wanted.corpora:
            raise RequestError("--prompt and --corpus both give prompts; use one of them")
        for name, value in _cut(wanted):
            if value is not None:
                raise RequestError(f"--{name} {value} is for prompts cut from a corpus; drop it, or --prompt")
        corpus.check_utf8(wanted.prompt)
        made = corpus.Prompt("prompt", "prompt", tuple(loaded.tokenizer.encode(wanted.prompt)), wanted.prompt)
        corpus.check_prompt(made, room=wanted.max_tokens, context=loaded.context)
        return [Text(made.id, made.tokens)], []
    prompts, notices = corpus.load_corpora(
        wanted.corpora or CORPORA, loaded.tokenizer, prompts=wanted.prompts or PROMPTS,
        prompt_tokens=wanted.prompt_tokens or PROMPT_TOKENS, room=wanted.max_tokens, context=loaded.context,
    )  # fmt: skip
    return [Text(p.id, p.tokens) for p in prompts], notices


def _diagnose(wanted: Wanted, loaded: Loaded, arms: list[Candidate], texts: list[Any], say: Any) -> dict[str, Any]:
    from mtplab.backend import numerics
    from mtplab.decode.settings import Settings
    from mtplab.decode.stopping import Stops
    from mtplab.diagnose.diverge import Diagnoser
    from mtplab.diagnose.intervene import explain
    from mtplab.diagnose.locate import locate
    from mtplab.diagnose.summary import document

    settings = Settings(
        max_tokens=wanted.max_tokens, ignore_eos=wanted.ignore_eos, prefill_step=wanted.prefill_step
    )  # fmt: skip
    tokenizer, name = loaded.tokenizer, None
    with contextlib.ExitStack() as stack:
        if wanted.simulate is not None:
            name = stack.enter_context(numerics.simulate(loaded.target, wanted.simulate)).name
        diagnoser = Diagnoser(
            loaded.target, settings=settings, stops=lambda: Stops(settings, tokenizer.eos_ids, tokenizer.decode),
            head=loaded.head, say=say, locate=locate, explain=explain if wanted.explain else None,
        )  # fmt: skip
        return document(diagnoser.run(texts, arms, simulated=name))


def _effective(wanted: Wanted, arms: list[Candidate], texts: list[Any]) -> dict[str, Any]:
    from mtplab.backend import facts

    with_head = next((a for a in arms if a.drafter == "mtp"), None)
    cut = wanted.prompt is None  # a prompt that was given is used as it stands
    return {
        "arms": [a.name for a in arms],
        "corpora": list(wanted.corpora or CORPORA) if cut else None,
        "prompts": len(texts),
        "prompt_tokens": (wanted.prompt_tokens or PROMPT_TOKENS) if cut else None,
        "max_tokens": wanted.max_tokens,
        "prefill_step": wanted.prefill_step,
        "ignore_eos": wanted.ignore_eos,
        "history": with_head and with_head.history,
        "prime": with_head and with_head.prime,
        "simulate": wanted.simulate,
        "explain": wanted.explain,
        **facts(),
    }
