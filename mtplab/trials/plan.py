"""A plan: arms x prompts x rounds x modes, written down before anything runs.

One trial is one arm on the block of ALL prompts (every corpus, every mode) in one fresh process. Every round runs
every arm once, in an order shuffled by the seed: when the machine slows down, every arm meets the slow time.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import random
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from mtplab.decode.settings import check_drafting, check_drafts, check_history, check_verify
from mtplab.errors import RequestError

SCHEMA = 1
MODES = ("greedy", "sampled")
ARMS = ("baseline", "depth0", "depth1", "depth2", "depth3", "adaptive")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides what a run measures; two runs with the same `digest` may be joined by a resume."""

    kind: ClassVar[str] = "sweep"  # the verb that runs it

    model: str = "lab-mtp"
    corpora: tuple[str, ...] = ("novel", "c")
    arms: tuple[str, ...] = ARMS
    rounds: int = 5
    prompts: int = 8  # per corpus
    prompt_tokens: int = 128
    max_tokens: int = 128
    modes: tuple[str, ...] = MODES
    temp: float = 0.8  # of the sampled mode; greedy is temperature 0
    top_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = True  # every arm then makes the same number of tokens
    prefill_step_size: int = 2048
    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    dtype: str | None = None
    history: str = "verified"
    prime: bool = True
    drafts: str = "sampled"  # under temperature: drawn from the head's distribution, or its first choice ("point")
    head_folder: str | None = None  # a head of its own instead of the checkpoint's
    recursion: str | None = None  # these three override the head family's row where public codes differ
    hidden: str | None = None
    head_norms: str | None = None
    assistant: str | None = None  # checkpoint of a Gemma 4 assistant that drafts instead of a head
    verify: str = "batched"  # how a block of drafts is checked: batched, rowwise, fixed or serial
    trust_remote_code: bool = False
    trial_timeout_s: float = 3600.0
    repeat_disturbed: bool = True

    def __post_init__(self) -> None:
        _check(self)

    @property
    def digest(self) -> str:
        """Hash of what is measured. The two last settings only say how patient the runner is."""
        data = {k: v for k, v in self.to_json().items() if k not in ("trial_timeout_s", "repeat_disturbed")}
        if data["verify"] == "batched":
            del data["verify"]  # what every run did before there was a choice
        if data["head_folder"] is None:
            del data["head_folder"]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, where: str = "the plan") -> Plan:
        """A plan from a dict; an unknown key or a value of the wrong type is an error that names it."""
        return cls(**{k: typed(k, v, where, cls) for k, v in data.items()})


@dataclass(frozen=True, slots=True)
class Trial:
    """One arm on the whole block of prompts in one fresh process."""

    number: int
    arm: str
    round: int

    @property
    def name(self) -> str:
        return f"{self.number:03d}-{self.arm}-{self.round}"


def order(plan: Plan) -> list[Trial]:
    """All trials in the order they run: per round a shuffle of the arms that depends on seed and round alone."""
    trials: list[Trial] = []
    for number in range(plan.rounds):
        arms = list(plan.arms)
        random.Random(f"{plan.seed}/{number}").shuffle(arms)
        trials += [Trial(len(trials) + i, arm, number) for i, arm in enumerate(arms)]
    return trials


def load_plan(path: Path | str, cls: Any = Plan) -> Any:
    """A plan from a TOML file: the fields of `Plan` (or of another verb's plan) as top-level keys."""
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"plan {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"plan {str(path)!r} is not UTF-8 (byte offset {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"plan {str(path)!r} is not TOML: {error}") from None
    return cls.from_json(data, where=f"plan {str(path)!r}")


def change(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """The plan with the given fields replaced; None means "not asked for" and changes nothing."""
    asked = {k: typed(k, v, "the request") for k, v in changes.items() if v is not None}
    changed = replace(plan, **asked)
    # What would have no effect was asked for in error.
    for key in ("temp", "top_p", "top_k"):
        if key in asked and "sampled" not in changed.modes:
            raise RequestError(
                f"{key} is for the sampled mode, and modes is {','.join(changed.modes)}; drop one of them"
            )
    if "kv_group_size" in asked and changed.kv_bits is None:
        raise RequestError("kv_group_size is for a quantized cache; give kv_bits, too, or drop it")
    _check_drafting(changed, asked)
    return changed


def _check_drafting(plan: Plan, asked: Mapping[str, Any]) -> None:
    """Options of drafting that none of the arms would use, by flag or by the plan's file."""
    given = {k: getattr(plan, k) for k in ("history", "prime", "drafts")}
    given = {k: v for k, v in given.items() if k in asked or v != Plan.__dataclass_fields__[k].default}
    head = any(re.fullmatch(r"adaptive|depth[1-9]\d*", arm) for arm in plan.arms)
    check_drafting(given, head=head, assistant=plan.assistant is not None, sampled="sampled" in plan.modes)


def differences(old: Plan, new: Plan) -> list[str]:
    """What keeps two plans from being one run, as `key: old -> new`."""
    a, b = old.to_json(), new.to_json()
    patience = ("trial_timeout_s", "repeat_disturbed")
    return [f"{k}: {a[k]} -> {b[k]}" for k in a if a[k] != b[k] and k not in patience]


KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "int | None": (int, type(None)),
    "float | None": (int, float, type(None)),
    "str | None": (str, type(None)),
}


def typed(key: str, value: Any, where: str, cls: Any = Plan) -> Any:
    """A plan's value, checked against the field's annotation; RequestError names key, value and source."""
    kinds = {f.name: str(f.type) for f in fields(cls)}
    if key not in kinds:
        near = difflib.get_close_matches(key, kinds, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(kinds)}"
        raise RequestError(f"{where} has the unknown key {key!r}; {hint}")
    kind = kinds[key]
    if kind.startswith("tuple"):
        item, name = (int, "whole numbers") if "int" in kind else (str, "strings")
        if not isinstance(value, (list, tuple)) or not all(type(v) is item for v in value):
            raise RequestError(f"{where}: {key} must be a list of {name}, not {value!r}")
        return tuple(value)
    right = isinstance(value, KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
    if not right:
        raise RequestError(f"{where}: {key} must be {kind.replace(' | None', '')}, not {value!r}")
    return float(value) if kind.startswith("float") and value is not None else value


LEAST = {"rounds": 1, "prompts": 1, "prompt_tokens": 1, "max_tokens": 1, "prefill_step_size": 1, "top_k": 0, "seed": 0}


def _check(plan: Plan) -> None:
    for key, least in LEAST.items():
        if getattr(plan, key) < least:
            raise RequestError(f"{key} is {getattr(plan, key)} but must be at least {least}")
    for key in ("corpora", "arms", "modes"):
        names = getattr(plan, key)
        if not names:
            raise RequestError(f"{key} is empty; name at least one")
        for name in names:
            if names.count(name) > 1:
                raise RequestError(f"{key} names {name!r} twice; name each once")
    check_verify(plan.verify)
    check_history(plan.history)
    check_drafts(plan.drafts)
    for mode in plan.modes:
        if mode not in MODES:
            raise RequestError(f"mode {mode!r} is not one of {', '.join(MODES)}")
    if "baseline" not in plan.arms:
        raise RequestError("the arms lack 'baseline', which every ratio is taken against; add it")
    if "sampled" in plan.modes and not 0 < plan.temp < math.inf:
        raise RequestError(f"temp is {plan.temp}, but the sampled mode needs one above 0; or use --modes greedy")
    if not 0 <= plan.top_p <= 1:
        raise RequestError(f"top_p is {plan.top_p} but must lie in 0..1")
    if not plan.trial_timeout_s > 0:
        raise RequestError(f"trial_timeout_s is {plan.trial_timeout_s} but must be above 0")
