"""MTP heads inside the loop: exact predictors, priming, the pairing of rows, multi-depth recursion."""

from __future__ import annotations

import helpers
import mlx.core as mx
import numpy as np
import pytest
import tiny
from mlx.utils import tree_flatten

from mtplab.decode.drafters.mtp import MTPDrafter
from mtplab.decode.drafters.simple import OracleDrafter
from mtplab.decode.selection import Draws
from mtplab.decode.settings import Settings
from mtplab.errors import ModelError, RequestError
from mtplab.models.loader import load_target
from mtplab.records.metrics import conditional

SIZE = 32  # vocabulary = hidden size: every token has an orthogonal embedding


def permutation_model(folder, fusion_reads: str, seed: int = 0):
    """A MiMo checkpoint whose trunk says perm(token) and whose head is exactly predictive.

    The layers are switched off, so the hidden state at t is the embedding of token t. The head either maps
    hidden -> embedding of the next token (chains through its own output) or passes the embedding on.
    """
    config = tiny.MIMO | {"hidden_size": SIZE, "vocab_size": SIZE, "tie_word_embeddings": False}
    tiny.build(folder, "mimo", **{k: config[k] for k in ("hidden_size", "vocab_size", "tie_word_embeddings")})
    weights = mx.load(str(folder / "model.safetensors"))
    rng = np.random.default_rng(seed)
    order = rng.permutation(SIZE)  # one cycle through all tokens: greedy text repeats after 32 tokens only
    perm = np.empty(SIZE, dtype=int)
    perm[order] = np.roll(order, -1)
    basis = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))[0] * SIZE**0.5
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = mx.zeros_like(weights[name])
        elif "norm" in name:
            weights[name] = mx.ones_like(weights[name])
    weights["model.embed_tokens.weight"] = mx.array(basis.astype(np.float32))
    unembed = np.empty_like(basis)
    unembed[perm] = basis
    weights["lm_head.weight"] = mx.array(unembed.astype(np.float32))
    step = sum(np.outer(basis[perm[t]], basis[t]) for t in range(SIZE)) / SIZE
    zero, one = np.zeros((SIZE, SIZE)), np.eye(SIZE)
    proj = np.concatenate([step, zero] if fusion_reads == "hidden" else [zero, one], axis=1)
    weights["model.mtp_layers.0.input_proj.weight"] = mx.array(proj.astype(np.float32))
    tiny.write(folder, config, weights)
    return folder


@pytest.mark.parametrize("reads", ["hidden", "embedding"])
@pytest.mark.parametrize("recursion", ["final", "block"])
def test_an_exactly_predictive_head_is_always_accepted(tmp_path, reads, recursion):
    """Below 1.0 at depth >= 2 would mean a wrong recursion hidden, a shifted pairing or a stale cache."""
    loaded = load_target(permutation_model(tmp_path / "m", reads), recursion=recursion)
    settings = Settings(max_tokens=100)
    for k in (1, 2, 3):
        drafter = MTPDrafter(loaded.head, settings, Draws(0, 0))
        records = list(helpers.run_speculative(loaded.target, [3, 1, 4], settings, drafter, k))
        request = helpers.as_request(records)
        assert conditional([request]) == [1.0] * k
        assert helpers.tokens_of(records) == helpers.tokens_of(helpers.run_baseline(loaded.target, [3, 1, 4], settings))


@pytest.mark.parametrize("kind", ["mimo", "qwen3_5"])
@pytest.mark.parametrize("step", [1, 5, 2048])
def test_the_primed_head_cache_holds_the_whole_text(load, kind, step):
    """Row t of the head's cache is what one uncached pass over (hidden[t], token[t+1]) computes."""
    loaded = load(kind)
    target, head, prompt = loaded.target, loaded.head, tiny.prompt(6, 17)
    settings = Settings(max_tokens=14, prefill_step=step)
    drafter, cache = MTPDrafter(head, settings, Draws(0, 0)), target.new_cache()
    text = prompt + helpers.tokens_of(helpers.run_speculative(target, prompt, settings, drafter, 2, cache=cache))
    drafter._trim(drafter.chained)
    drafter._absorb()
    whole = target.forward(mx.array(text[:-1]), target.new_cache())
    fresh = head.new_cache()
    head.rows(mx.array(text[1:]), whole.hidden, fresh)
    assert drafter.cache[0].offset == fresh[0].offset == len(text) - 1
    for a, b in zip(helpers.contents(drafter.cache[0]), helpers.contents(fresh[0]), strict=True):
        assert np.array_equal(a, b)


def test_unprimed_starts_from_nothing(load):
    loaded, prompt, settings = load("mimo"), tiny.prompt(6, 17), Settings(max_tokens=6)
    drafter = MTPDrafter(loaded.head, settings, Draws(0, 0), prime=False)
    list(helpers.run_speculative(loaded.target, prompt, settings, drafter, 1))
    assert drafter.cache[0].offset <= 6


def test_drafted_history_keeps_the_chained_rows(tmp_path):
    """All drafts stand, so with history "drafted" the chain's own rows stay and only the bonus row is new."""
    loaded = load_target(permutation_model(tmp_path / "m", "hidden"))
    settings = Settings(max_tokens=31)
    seen = {}
    for history in ("verified", "drafted"):
        drafter = MTPDrafter(loaded.head, settings, Draws(0, 0), history=history)
        for record in helpers.run_speculative(loaded.target, [3], settings, drafter, 3):
            if getattr(record, "accepted", 0) == 3:
                seen[history] = sum(t.shape[0] for t, _ in drafter.pending)
                break
    assert seen == {"verified": 4, "drafted": 2}


def test_oracle_is_accepted_to_the_end(load):
    """2,000 tokens: a drafter or target cache trimmed by too much would decay slowly while output stays right."""
    for kind in ("llama", "qwen3_5"):
        target, settings = load(kind).target, Settings(max_tokens=2000)
        future = helpers.tokens_of(helpers.run_baseline(target, [5, 9], Settings(max_tokens=2010)))
        records = list(helpers.run_speculative(target, [5, 9], settings, OracleDrafter(future), 3))
        assert conditional([helpers.as_request(records)]) == [1.0, 1.0, 1.0]
        assert helpers.tokens_of(records) == future[:2000]


def test_hidden_of_another_width_is_refused(load):
    loaded = load("mimo")
    with pytest.raises(ModelError, match="takes hidden states of 32, but the trunk gives 16"):
        loaded.head.rows(mx.array([1]), mx.zeros((1, 16)), loaded.head.new_cache())


def test_unknown_history(load):
    with pytest.raises(RequestError, match="'both' is not one of verified, drafted, none"):
        MTPDrafter(load("mimo").head, Settings(), Draws(0, 0), history="both")


def test_the_trunk_exists_once(load):
    """The head shares the trunk's embedding and unembedding; it holds no copy of them."""
    loaded = load("mimo")
    names = [n for n, _ in tree_flatten(loaded.head.parameters())]
    assert not any("embed_tokens" in n or "lm_head" in n for n in names)
    assert loaded.head._target is loaded.target
