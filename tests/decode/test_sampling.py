"""Sampling: keyed, exact, and the same chain for p and q."""

from __future__ import annotations

import collections

import helpers
import mlx.core as mx
import numpy as np
import pytest
import tiny
from scipy import stats

from mtplab.decode.drafters.mtp import MTPDrafter
from mtplab.decode.drafters.simple import ScriptedDrafter
from mtplab.decode.selection import Draws, greedy, probs
from mtplab.decode.settings import Settings
from mtplab.errors import RequestError


def test_greedy_takes_the_lowest_id_on_ties_in_every_dtype():
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        logits = mx.array([[0.0, 5.0, 5.0, 1.0], [-mx.inf, -mx.inf, 2.0, 2.0]]).astype(dtype)
        assert greedy(logits).tolist() == [1, 2]


def reference_probs(logits, temp, top_k, top_p):
    """Temperature, top-k, top-p by sorting, in float64."""
    x = np.asarray(logits, dtype=np.float64) / temp
    if top_k:
        x[x < np.sort(x)[-top_k]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    if top_p:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
        p /= p.sum()
    return p


@pytest.mark.parametrize("temp, top_k, top_p", [(0.8, 0, 0), (1.3, 5, 0), (0.7, 0, 0.6), (1.0, 8, 0.9), (0.5, 1, 0)])
def test_the_chain_of_temperature_top_k_and_top_p(temp, top_k, top_p):
    logits = 3 * np.random.default_rng(0).normal(size=(4, 40)).astype(np.float32)
    got = np.array(probs(mx.array(logits), Settings(temp=temp, top_k=top_k, top_p=top_p)))
    for row, x in zip(got, logits, strict=True):
        assert np.allclose(row, reference_probs(x.copy(), temp, top_k, top_p), atol=1e-6)


def test_impossible_settings():
    for options in (
        {"temp": -1},
        {"temp": float("nan")},
        {"top_p": 2},
        {"top_k": -1},
        {"max_tokens": 0},
        {"stop": ("",)},
    ):
        with pytest.raises(RequestError, match="out of range"):
            Settings(**options)
    with pytest.raises(RequestError, match="--temp above 0"):
        Settings(top_p=0.9)


def test_draws_depend_on_their_name_only():
    a, b = Draws(1, 2), Draws(1, 2)
    first = a.uniform(5, "accept", 3).tolist()
    mx.random.seed(99)
    mx.random.normal((100,))
    b.uniform(7, "sample")
    assert b.uniform(5, "accept", 3).tolist() == first
    others = [Draws(2, 2).uniform(5, "accept", 3), Draws(1, 3).uniform(5, "accept", 3), a.uniform(6, "accept", 3)]
    assert all(o.tolist() != first for o in [*others, a.uniform(5, "draft", 3)])
    assert len(set(first)) == 3


def test_baseline_and_depth0_draw_the_same_and_seeds_differ(load):
    target, prompt = load("mimo").target, tiny.prompt(3, 9)
    settings = Settings(max_tokens=40, temp=0.8, top_p=0.9)
    base = helpers.tokens_of(helpers.run_baseline(target, prompt, settings))
    mx.random.seed(5)
    assert helpers.tokens_of(helpers.run_speculative(target, prompt, settings, None, 0)) == base
    other = Settings(max_tokens=40, temp=0.8, top_p=0.9, seed=1)
    assert helpers.tokens_of(helpers.run_baseline(target, prompt, other)) != base


class Fixed:
    """A target without a model: logits depend on the last token only, so joint outcomes have a closed form."""

    def __init__(self, table):
        self.table, self.tape, self.vocab = mx.array(table), None, len(table)

    def new_cache(self):
        return helpers.CountingCache()

    def forward(self, tokens, cache):
        from mtplab.models.target import Output

        cache.length += tokens.shape[0]
        return Output(self.table[tokens], mx.zeros((tokens.shape[0], 1)))


class Sampled:
    """Drafts drawn from q(. | last token), a distribution of its own."""

    def __init__(self, table, settings, draws, point):
        self.table, self.settings, self.draws, self.point = table, settings, draws, point

    def begin(self, prompt):
        self.last = prompt[-1]

    def prime(self, tokens, hidden):
        return []

    def observe(self, tokens, hidden, accepted):
        self.last = tokens[-1]

    def draft(self, k, position):
        from mtplab.kernels.accept import draw

        from mtplab.decode.drafters.base import Draft

        tokens, dists, last = [], [], self.last
        for i in range(k):
            q = probs(mx.array(self.table[last])[None], self.settings)
            last = (
                int(np.argmax(self.table[last]))
                if self.point
                else draw(q[0], self.draws.uniform(position + i, "draft")).item()
            )
            tokens.append(last)
            dists.append(q)
        return Draft(mx.array(tokens), None if self.point else mx.concatenate(dists))


@pytest.mark.parametrize("point", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_joint_outcomes_of_three_tokens_have_the_targets_distribution(point, k):
    """Chi-square over 4,000 requests through the real loop; the drafter is badly wrong on purpose."""
    rng = np.random.default_rng(k)
    p_table, q_table = rng.normal(size=(4, 4)) * 1.2, rng.normal(size=(4, 4)) * 1.2
    target, counts = Fixed(p_table.astype(np.float32)), collections.Counter()
    settings, runs = Settings(max_tokens=4, temp=1.0), 4000
    for request in range(runs):
        drafter = Sampled(q_table.astype(np.float32), settings, Draws(0, request), point)
        records = helpers.run_speculative(target, [0], settings, drafter, k, request=request)
        counts[tuple(helpers.tokens_of(records)[1:])] += 1
    p = np.exp(p_table) / np.exp(p_table).sum(1, keepdims=True)
    outcomes = list(np.ndindex(4, 4, 4))
    # The first of the four tokens comes from the prefill, by plain sampling: marginalize over it.
    expected = np.array([sum(p[0, f] * p[f, a] * p[a, b] * p[b, c] for f in range(4)) for a, b, c in outcomes]) * runs
    observed = np.array([counts[o] for o in outcomes])
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    assert stats.chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize("kind", ["mimo", "qwen3_5"])
def test_a_sampled_run_reconciles_and_repeats(load, kind):
    loaded, prompt = load(kind), tiny.prompt(3, 9)
    settings = Settings(max_tokens=40, temp=0.8)
    runs = []
    for _ in range(2):
        drafter = MTPDrafter(loaded.head, settings, Draws(0, 0))
        records = list(helpers.run_speculative(loaded.target, prompt, settings, drafter, 3))
        assert 1 + sum(r.emitted for r in records[1:]) == 40 == len(helpers.tokens_of(records))
        runs.append(helpers.tokens_of(records))
    assert runs[0] == runs[1]


def test_point_drafts_under_temperature_are_not_always_accepted(load):
    """An oracle for greedy text is a point mass: under temperature it stands with p(x) only."""
    target, prompt = load("mimo").target, tiny.prompt(3, 9)
    future = helpers.tokens_of(helpers.run_baseline(target, prompt, Settings(max_tokens=60)))
    settings = Settings(max_tokens=40, temp=1.5)
    drafter = ScriptedDrafter(future, [9], tiny.VOCAB)
    records = list(helpers.run_speculative(target, prompt, settings, drafter, 3))
    assert 0 < sum(r.accepted for r in records[1:]) + 1 < sum(r.proposed for r in records[1:])


def test_point_drafts_of_a_head(load):
    """`drafts="point"`: no distribution is handed on, the drafts are the head's first choices, counts reconcile."""
    loaded, prompt, settings = load("mimo"), tiny.prompt(3, 9), Settings(max_tokens=40, temp=0.8)
    point = MTPDrafter(loaded.head, settings, Draws(0, 0), drafts="point")
    chosen = MTPDrafter(loaded.head, Settings(), Draws(0, 0))
    for drafter in (point, chosen):
        drafter.prime(mx.array(prompt[1:]), mx.ones((8, 32)))
        drafter.observe([7], mx.ones((1, 32)), 0)
    a, b = point.draft(3, 1), chosen.draft(3, 1)
    assert a.kind == "point" and a.tokens.tolist() == b.tokens.tolist()
    records = list(helpers.run_speculative(loaded.target, prompt, settings, point, 3))
    assert 1 + sum(r.emitted for r in records[1:]) == 40
    with pytest.raises(RequestError, match="'best' is not one of sampled, point"):
        MTPDrafter(loaded.head, settings, Draws(0, 0), drafts="best")
