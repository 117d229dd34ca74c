"""What a continuation scores, against sums worked out in numpy."""

from __future__ import annotations

import json
import shutil

import canvas_tiny
import mlx.core as mx
import numpy as np
import pytest
import tiny
from canvas_builders import canvas_request

from mtplab.errors import RequestError
from mtplab.models import load_target
from mtplab.models.canvas import load_denoiser
from mtplab.trials.canvas_arms import ENCODER, Scorer

PROMPT = [3, 40, 7, 7, 61]
MADE = canvas_request([[5, 9, 80, 2], [11, 93, 44, 60]], emitted=3)
AFTER = [5, 9, 80, 2, 11, 93, 44]  # 93 is the text "<93>"; the last of the canvas is over the cap
BEGIN = 96


@pytest.fixture(scope="module")
def denoiser(tmp_path_factory):
    return load_denoiser(canvas_tiny.build(tmp_path_factory.mktemp("canvas") / "gemma", "gemma"))


@pytest.fixture(scope="module")
def other(checkpoints, tmp_path_factory):
    """A model whose tokenizer has other ids for the same letters and begins every text with BEGIN."""
    folder = shutil.copytree(checkpoints("llama"), tmp_path_factory.mktemp("other") / "llama")
    tokenizer = tiny.byte_tokenizer()
    begin = next(text for text, i in tokenizer["model"]["vocab"].items() if i == BEGIN)
    tokenizer["model"]["vocab"] = {text: translated(i) for text, i in tokenizer["model"]["vocab"].items()}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {begin: {"id": begin, "ids": [BEGIN], "tokens": [begin]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def translated(i):
    return (i * 7 + 5) % 90 if i < 90 else i


def letters(tokens):
    """The four letters of "<93>" are four tokens of the other model."""
    return [i for t in tokens for i in ([t] if t < 90 else [ord(c) - 33 for c in f"<{t}>"])]


def expected(rows, before, after):
    """rows: logits [L, V], row t about token t + 1. Sum over the continuation of -log softmax, in float64."""
    rows, tokens = np.array(rows).astype(np.float64), [*before, *after]
    logs = rows - rows.max(axis=1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
    return -sum(logs[t - 1, tokens[t]] for t in range(len(before), len(tokens)))


def token_by_token(folder, tokens):
    target = load_target(folder, head="none").target
    cache = target.new_cache()
    return np.concatenate([np.array(target.forward(mx.array([t]), cache).logits) for t in tokens])


def test_the_encoder_scores_the_continuation_and_nothing_else(denoiser):
    made = Scorer(ENCODER, denoiser).score(PROMPT, MADE)
    wanted = expected(denoiser.encoder_logits([*PROMPT, *AFTER]), PROMPT, AFTER)
    assert made.nll == pytest.approx(wanted, rel=1e-5)
    assert (made.scored, made.scorer, made.tokens) == (len(AFTER), ENCODER, tuple(AFTER))


def test_a_model_with_the_same_tokenizer_scores_the_same_ids(denoiser, checkpoints):
    folder = checkpoints("llama")
    made = Scorer(str(folder), denoiser).score(PROMPT, MADE)
    wanted = expected(token_by_token(folder, [*PROMPT, *AFTER]), PROMPT, AFTER)
    assert made.nll == pytest.approx(wanted, rel=1e-5) and (made.scored, made.scorer) == (len(AFTER), str(folder))


def test_a_model_with_another_tokenizer_scores_the_text_as_its_own_tokens(denoiser, other):
    made = Scorer(str(other), denoiser).score(PROMPT, MADE)
    before = [BEGIN, *map(translated, PROMPT)]
    after = [translated(i) for i in letters(AFTER)]  # BEGIN stands at the beginning alone
    wanted = expected(token_by_token(other, [*before, *after]), before, after)
    assert made.nll == pytest.approx(wanted, rel=1e-5) and made.scored == len(AFTER) + 3


def test_special_tokens_at_the_end_of_every_text_are_not_scored(denoiser, other, tmp_path):
    folder = shutil.copytree(other, tmp_path / "ends")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    begin = tokenizer["post_processor"]["single"][0]
    tokenizer["post_processor"]["single"].append(begin)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    asked, made = (Scorer(str(f), denoiser).score(PROMPT, MADE) for f in (other, folder))
    assert (made.nll, made.scored) == (asked.nll, asked.scored)
    nothing = Scorer(str(other), denoiser).score([], MADE)  # but for what every text begins with
    after = [translated(i) for i in letters(AFTER)]
    assert nothing.nll == pytest.approx(expected(token_by_token(other, [BEGIN, *after]), [BEGIN], after), rel=1e-5)


def test_an_id_that_the_scorer_does_not_have_is_refused(denoiser, checkpoints):
    scorer = Scorer(str(checkpoints("llama", vocab_size=93)), denoiser)
    with pytest.raises(RequestError, match=r"token 93 is not an id of the scorer .*, whose vocabulary has 93"):
        scorer.score(PROMPT, MADE)
    with pytest.raises(RequestError, match="token 95 is not an id of the scorer"):
        scorer.check_room([3, 95], 4)


def test_a_request_that_made_nothing_has_no_score(denoiser):
    made = Scorer(ENCODER, denoiser).score(PROMPT, canvas_request([[5, 9]], emitted=0))
    assert (made.nll, made.scored, made.scorer) == (None, 0, ENCODER)


def test_what_the_scorer_cannot_hold_is_refused_before_it_is_decoded(denoiser, checkpoints):
    scorer = Scorer(str(checkpoints("llama", max_position_embeddings=12)), denoiser)
    words = "5 prompt tokens and 8 after them do not fit the context of 12 of the scorer"
    scorer.check_room(PROMPT, 7)
    assert scorer.score(PROMPT, MADE).scored == 7
    with pytest.raises(RequestError, match=words):
        scorer.check_room(PROMPT, 8)
    with pytest.raises(RequestError, match=words):
        scorer.score(PROMPT, canvas_request([[5, 9, 80, 2], [11, 93, 44, 60]]))


def test_with_another_tokenizer_the_prompt_is_refused_at_once_and_the_text_when_it_is_there(denoiser, other, tmp_path):
    folder = shutil.copytree(other, tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 12}))
    scorer = Scorer(str(folder), denoiser)
    scorer.check_room(PROMPT, 12)
    with pytest.raises(RequestError, match="6 prompt tokens and 10 after them do not fit the context of 12"):
        scorer.score(PROMPT, MADE)
    with pytest.raises(RequestError, match="12 prompt tokens and 1 after them"):
        scorer.check_room([3] * 11, 1)
