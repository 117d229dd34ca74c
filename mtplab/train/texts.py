"""Texts -> the beginnings that the target continues, some of them held out.

Every window is `length` tokens of a text or a whole prompt of a chat. One window in sixteen is never trained on.
A row is one of four kinds in turn: the text itself, the target's greedy continuation, and twice a sampled one,
since the head is used on text of the target's own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtplab.errors import RequestError
from mtplab.train.plan import HeadPlan
from mtplab.trials import corpus

KINDS = ("text", "greedy", "sampled", "sampled")
HELD = 16  # one window in so many is held out
WINDOWS = 2048  # at most, per corpus


@dataclass(frozen=True, slots=True)
class Start:
    """One row to be: the tokens that are given, and how the rest is chosen."""

    corpus: str
    kind: str
    tokens: tuple[int, ...]


class Texts:
    """All windows of a plan's corpora under one tokenizer."""

    def __init__(self, plan: HeadPlan, tokenizer: Any, context: int):
        if plan.length > context:
            raise RequestError(f"--length {plan.length} is beyond the model's context of {context}; lower it")
        self.plan, self.names = plan, [corpus.corpus_name(s) for s in plan.corpora]
        self.windows: dict[str, dict[bool, list[corpus.Prompt]]] = {}
        for spec, name in zip(plan.corpora, self.names, strict=True):
            if name in self.windows:
                raise RequestError(f"two corpora are called {name!r}; rename one of the files")
            self.windows[name] = self._split(spec, name, tokenizer, context)

    def _split(self, spec: str, name: str, tokenizer: Any, context: int) -> dict[bool, list[corpus.Prompt]]:
        documents = corpus.read_documents(spec)
        # The windows must not depend on the number of rows: a run that goes on with more keeps the same ones held out.
        cut = corpus.cut(documents, name, tokenizer, prompts=WINDOWS, size=self.plan.length, limit=context)
        # Short windows may begin at one and the same word; what is held out must not be trained on by another way.
        found = list({p.id: p for p in cut if p.tokens}.values())
        if len(found) < 2:
            raise RequestError(
                f"corpus {spec!r} gives {len(found)} windows of {self.plan.length} tokens, and one is to be held out; "
                "give a longer text"
            )
        random.Random(f"{self.plan.seed}/{name}").shuffle(found)
        held = max(1, len(found) // HELD)
        return {True: found[:held], False: found[held:]}

    def starts(self, shard: int, count: int, *, held_out: bool = False) -> list[Start]:
        """The `count` rows of one file: corpora in turn, kinds in turn, windows in a shuffled order."""
        out = []
        for i in range(shard * self.plan.gather, shard * self.plan.gather + count):
            name, turn = self.names[i % len(self.names)], i // len(self.names)
            windows = self.windows[name][held_out]
            out.append(self._start(name, KINDS[turn % len(KINDS)], windows[turn % len(windows)].tokens))
        return out

    def _start(self, name: str, kind: str, tokens: Sequence[int]) -> Start:
        # A short window (a chat prompt, the end of a text) has nothing more to give: the target goes on from there.
        given = tokens[: self.plan.length if kind == "text" else self.plan.prompt_tokens]
        return Start(name, kind, tuple(given))
