"""One loaded denoiser under one policy: the session that `denoise` runs and the scoring of what it wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mtplab.backend.clock import Clock, MonotonicClock
from mtplab.decode.canvas import denoise
from mtplab.decode.canvas_policy import THRESHOLDS, CanvasPolicy, resolve
from mtplab.decode.settings import Settings
from mtplab.decode.stopping import Stops
from mtplab.errors import ModelError, RequestError
from mtplab.records.canvas import Canvas, CanvasRequest, DenoiseStep
from mtplab.records.types import Prefill

ENCODER = "encoder"  # the scorer that needs no second model
MAX_TOKENS = 64  # where neither the request nor the checkpoint says


def label(policy: CanvasPolicy, sampler: str | None) -> str:
    """The sampler as tables name it: with its threshold, so that two of them never look alike."""
    kind = (sampler or {"entropy": "entropy" if policy.proposal == "sampled" else "argmax"}.get(
        policy.accept, policy.accept
    )).partition(":")[0]  # fmt: skip
    value = getattr(policy, THRESHOLDS[kind])
    return kind if value is None else f"{kind}:{value:g}"


class Session:
    """`asked`: fields of CanvasPolicy and `sampler`, None where nothing was asked for; see `resolve`.

    `max_tokens` is the cap of a request that is not given one: asked for, or the checkpoint's, or MAX_TOKENS.
    """

    def __init__(
        self,
        denoiser: Any,
        asked: Mapping[str, Any],
        *,
        max_tokens: int | None = None,
        clock: Clock | None = None,
    ):
        self.denoiser, self.clock = denoiser, clock or MonotonicClock()
        self.policy, self.sources = resolve(
            asked,
            denoiser.defaults,
            denoiser.default_sources,
            canvas=denoiser.canvas,
            masked=denoiser.start == "mask",
        )
        self.max_tokens, self.sources["max_tokens"] = _cap(max_tokens, denoiser)
        self.effective = self.policy.effective() | {
            "max_tokens": self.max_tokens,
            "sampler": label(self.policy, asked.get("sampler")),
            "self_conditioning": denoiser.self_conditioning,
            "sources": self.sources,
        }

    def run(
        self, tokens: Sequence[int], *, request: int, settings: Settings
    ) -> Iterator[Prefill | DenoiseStep | Canvas]:
        """Decode one prompt; see `mtplab.decode.canvas.denoise`."""
        self.check_room(len(tokens), settings.max_tokens)
        stops = Stops(settings, self.denoiser.eos_ids, self.denoiser.tokenizer.decode)
        return denoise(
            self.denoiser, tokens, policy=self.policy, settings=settings, stops=stops, clock=self.clock, request=request
        )

    def positions(self, max_tokens: int) -> int:
        """Canvases are whole, so a request may need more positions than it returns tokens."""
        return -(-max_tokens // self.policy.canvas) * self.policy.canvas

    def check_room(self, prompt: int, max_tokens: int) -> None:
        """Refuse what the context cannot hold; a cap that nobody asked for is named with its file and key."""
        positions, context = self.positions(max_tokens), self.denoiser.context
        if prompt + positions <= context:
            return
        _, colon, key = self.sources["max_tokens"].partition("checkpoint: ")
        if colon and max_tokens > context:
            raise ModelError(f"{key} = {max_tokens} is above this model's context of {context}; give --max-tokens")
        raise RequestError(
            f"{prompt} prompt tokens and {positions} canvas positions do not fit the model's context of {context}; "
            f"lower --max-tokens{f' (now {max_tokens}, from {key})' if colon else ''} or shorten the prompt"
        )

    def settings(self, settings: Settings) -> dict[str, Any]:
        """The effective value of everything; `stop` is the policy's, the stop strings are `stop_text`."""
        own = settings.effective()
        return {"stop_text": own.pop("stop")} | self.effective | own

    def request(
        self, tokens: Sequence[int], *, request: int, settings: Settings, id: str = "0", corpus: str = ""
    ) -> CanvasRequest:
        """`run` to its end, as one record."""
        return collect(
            list(self.run(tokens, request=request, settings=settings)),
            self.settings(settings),
            id=id,
            corpus=corpus,
        )


def _cap(asked: int | None, denoiser: Any) -> tuple[int, str]:
    """Tokens at most, and where that comes from."""
    if asked is not None:
        return asked, "request"
    if "max_tokens" in denoiser.defaults:
        return denoiser.defaults["max_tokens"], f"checkpoint: {denoiser.default_sources['max_tokens']}"
    return MAX_TOKENS, "mtplab's default"


def collect(records: Sequence[Any], settings: Mapping[str, Any], *, id: str = "0", corpus: str = "") -> CanvasRequest:
    """The records of a run as a request. Sampling settings of the one-token decoders have no meaning here."""
    canvases = tuple(r for r in records if isinstance(r, Canvas))
    steps = tuple(r for r in records if isinstance(r, DenoiseStep))
    own = {k: v for k, v in settings.items() if k not in ("temp", "top_p", "top_k", "mode")}
    finish = canvases[-1].cut if canvases and canvases[-1].cut else "stopped"
    return CanvasRequest(id, corpus, records[0], canvases, steps, finish, own)


# Scoring ---------------------------------------------------------------------------------------------------------


class Scorer:
    """Negative log-likelihood of a continuation under a causal model: the denoiser's own encoder pass, or another.

    A model with another tokenizer scores the text as its own tokens; `scored` counts those then.
    """

    def __init__(self, name: str, denoiser: Any):
        self.name, self.denoiser, self.loaded = name, denoiser, None
        if name == ENCODER:
            if not denoiser.scores:
                raise RequestError("this denoiser has no causal pass to score with; name a model with --scorer")
            return
        from mtplab.models import load_target

        self.loaded = load_target(name, head="none")
        ours, theirs = (x.folder / "tokenizer.json" for x in (denoiser, self.loaded))
        self.same = ours.is_file() and theirs.is_file() and ours.read_bytes() == theirs.read_bytes()

    def check_room(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Refuse, before anything is decoded, a prompt after which so many tokens could not be scored.

        What a continuation is in another tokenizer shows only once it is there; `score` refuses it then.
        """
        if self.loaded is not None:
            before, _ = self._theirs(prompt, ())
            self._fit(len(before), max_tokens if self.same else 1)
            self._known(before)

    def score(self, prompt: Sequence[int], request: CanvasRequest) -> CanvasRequest:
        """The request with `nll`, `scored` and `scorer` filled in; RequestError for what the scorer cannot hold."""
        before, after = self._theirs(prompt, request.tokens)
        if not before or not after:
            return replace(request, scorer=self.name)
        self._fit(len(before), len(after))
        self._known([*before, *after])
        nll = self._nll(before, after)
        return replace(request, nll=nll, scored=len(after), scorer=self.name)

    def _theirs(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Prompt and continuation in the scorer's tokens."""
        if self.loaded is None or self.same:
            return list(prompt), list(tokens)
        ours, theirs = self.denoiser.tokenizer, self.loaded.tokenizer
        text = ours.decode(prompt)
        whole, plain = theirs.encode(text), theirs.plain(text)
        # The special tokens that every text begins with stay; those at its end do not stand in its middle.
        lead = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return whole[: lead + len(plain)] if plain else whole, theirs.plain(ours.decode(tokens))

    def _fit(self, before: int, after: int) -> None:
        context = (self.loaded or self.denoiser).context
        if before + after > context:
            raise RequestError(
                f"{before} prompt tokens and {after} after them do not fit the context of {context} of the scorer "
                f"{self.name}; lower --max-tokens or --prompt-tokens, or name another --scorer"
            )

    def _known(self, tokens: Sequence[int]) -> None:
        vocab = None if self.loaded is None else self.loaded.target.vocab
        if vocab is not None and max(tokens, default=0) >= vocab:
            raise RequestError(
                f"token {max(tokens)} is not an id of the scorer {self.name}, whose vocabulary has {vocab:,}; "
                "name a --scorer with its own tokenizer, or a larger one"
            )

    def _nll(self, before: Sequence[int], after: Sequence[int]) -> float:
        tokens = [*before, *after]
        if self.loaded is None:
            logits = self.denoiser.encoder_logits(tokens)
        else:
            target = self.loaded.target
            logits = target.forward(mx.array(tokens), target.new_cache()).logits
        rows = logits[len(before) - 1 : len(tokens) - 1].astype(mx.float32)
        chosen = mx.take_along_axis(rows, mx.array(list(after))[:, None], axis=-1)[:, 0]
        return float((mx.logsumexp(rows, axis=-1) - chosen).sum().item())
