"""mtplab's baseline loop against mlx-lm's own generator: a ratio to the baseline means nothing if that one is slow.

Both decode the same prompts on the same float32 weights, greedily, to the token cap (EOS is ignored), with the same
BLAS and compile off, one step launched ahead of the read. What a token costs beyond the forward pass differs:

  mtplab                the loop alone, consumed record by record
  mtplab_text           the same plus the streaming detokenizer, which is what stream_generate does for every token
  mlx_lm_step           mlx_lm.generate.generate_step: the loop alone (it also computes log-probabilities)
  mlx_lm_stream         mlx_lm.stream_generate

tok/s = (N - 1) / (t_last - t_first), read by the consumer at every token on all sides, summed over the prompts.
The tokens of all sides are compared; a difference is reported, not hidden.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import common

from mtplab.errors import RequestError

SIDES = ("mtplab", "mtplab_text", "mlx_lm_step", "mlx_lm_stream")
RATIOS = (
    common.Wanted("loop / stream_generate", "mtplab", "mlx_lm_stream", "tok_s", "at least", 1.0),
    common.Wanted("loop and text / stream_generate", "mtplab_text", "mlx_lm_stream", "tok_s", "at least", 1.0),
    common.Wanted("loop / generate_step", "mtplab", "mlx_lm_step", "tok_s", "at least", 1.0),
    common.Wanted("CPU time, stream_generate / loop and text", "mlx_lm_stream", "mtplab_text", "cpu_ms"),
)
WARM_TOKENS = 24

Decode = Callable[[list[int], int], Iterator[int]]


def mtplab_side(args: argparse.Namespace, text: bool) -> tuple[Decode, Any]:
    """The arm `baseline`, with or without turning every token into text."""
    from mtplab.decode.settings import Settings
    from mtplab.models import load_target
    from mtplab.records.types import Prefill
    from mtplab.trials.arms import Session, parse_arm

    loaded = load_target(common.model_folder(args.model), head="none", dtype="float32")
    session = Session(loaded, parse_arm("baseline"))

    def decode(prompt: list[int], count: int) -> Iterator[int]:
        stream = loaded.tokenizer.stream() if text else None
        settings = Settings(max_tokens=count, ignore_eos=True)
        for record in session.run(prompt, request=0, settings=settings):
            token = record.token if isinstance(record, Prefill) else record.tokens[0]
            if stream is not None:
                stream.add(token)
            yield token

    return decode, loaded.tokenizer


def mlx_lm_side(args: argparse.Namespace, stream: bool) -> tuple[Decode, Any]:
    """mlx_lm.load, cast to float32, with an EOS set that nothing is in."""
    import mlx.core as mx
    import mlx_lm
    from mlx.utils import tree_map
    from mlx_lm.generate import generate_step

    from mtplab.models.tokenizer import load_tokenizer

    folder = common.model_folder(args.model)
    model, tokenizer = mlx_lm.load(str(folder))
    floats = tree_map(lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a, model.parameters())
    model.update(floats)
    mx.eval(model.parameters())
    tokenizer.eos_token_ids = set()

    def decode(prompt: list[int], count: int) -> Iterator[int]:
        if stream:
            yield from (r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=count))
        else:
            yield from (token for token, _ in generate_step(mx.array(prompt), model, max_tokens=count))

    return decode, load_tokenizer(folder)


def measure(args: argparse.Namespace, side: str) -> common.Row:
    make = mtplab_side if side.startswith("mtplab") else mlx_lm_side
    decode, tokenizer = make(args, side in ("mtplab_text", "mlx_lm_stream"))
    texts, streams = common.prompts(args, tokenizer), []

    def emitted(prompt: list[int], count: int) -> Iterator[int]:
        streams.append([])
        for token in decode(prompt, count):
            streams[-1].append(token)
            yield 1

    common.Span.of(emitted(texts[0], min(WARM_TOKENS, args.max_tokens)))
    spans = [common.Span.of(emitted(prompt, args.max_tokens)) for prompt in texts]
    return common.per_token(spans) | {"streams": streams[1:], "dtype": "float32"}


def agreement(rounds: Sequence[common.Round]) -> dict[str, Any]:
    """Do all sides give the same tokens? Equal work is asserted; an unequal token is reported with its index."""
    reference, differing = rounds[0]["mtplab"]["streams"], {}
    for r in rounds:
        for side, row in r.items():
            if [len(t) for t in row["streams"]] != [len(t) for t in reference]:
                raise RequestError(f"{side} returned another number of tokens than mtplab; nothing is compared")
            first = [
                next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), None)
                for x, y in zip(row["streams"], reference, strict=True)
            ]
            found = [i for i in first if i is not None]
            if found:
                differing[side] = min([*found, differing.get(side, found[0])])
    return {"tokens_equal": not differing, "first_difference": differing}


def extra(args: argparse.Namespace, rounds: Sequence[common.Round]) -> dict[str, Any]:
    out = agreement(rounds)
    for r in rounds:
        for row in r.values():
            del row["streams"]  # compared; the document need not hold them
    return out | {"sides": common.medians(rounds, "tok_s", "cpu_ms", "host_ms")}


if __name__ == "__main__":
    raise SystemExit(common.main(common.options(__doc__), SIDES, measure, RATIOS, extra))
