"""Sampled acceptance: exact by enumeration (no sampling error), and the twin equal to the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mtplab import backend

backend.setup()

import mlx.core as mx  # noqa: E402
from mtplab.kernels.accept import accept_sampled, draw, read, reference  # noqa: E402

from mtplab.errors import ModelError  # noqa: E402


class Tables:
    """A distribution over V ids for every prefix, each drawn once; some ids get no mass at all."""

    def __init__(self, v: int, seed: int, sparse: float = 0.3):
        self.v, self.seed, self.sparse = v, seed, sparse
        self.known: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, prefix: tuple[int, ...]) -> np.ndarray:
        if prefix not in self.known:
            rng = np.random.default_rng([self.seed, len(prefix), *prefix])
            row = rng.gamma(0.5, size=self.v) * (rng.random(self.v) > self.sparse)
            row[rng.integers(self.v)] += 0.1
            self.known[prefix] = row / row.sum()
        return self.known[prefix]


def blocks(q, k: int, prefix: tuple[int, ...] = ()):
    """Every block of k drafts with its probability; `q` None: a point mass, the greedy drafts of `hint`."""
    for drafts in itertools.product(range(q.v), repeat=k):
        weight = np.prod([q(prefix + drafts[:i])[x] for i, x in enumerate(drafts)])
        if weight > 0:
            yield drafts, float(weight)


def emitted(p, proposals, k: int, *, point: bool, q=None) -> dict[tuple[int, ...], float]:
    """Joint distribution of the first k+1 tokens: one verify, then ordinary sampling up to that length."""
    joint: dict[tuple[int, ...], float] = {}
    for drafts, weight in proposals:
        rows = np.array([p(drafts[:i]) for i in range(k + 1)])
        scores = None if point else np.array([q(drafts[:i]) for i in range(k)]).reshape(k, p.v)
        for (n, token), chance in reference.outcomes(rows, scores, drafts).items():
            head = (*drafts[:n], token)
            for tail in itertools.product(range(p.v), repeat=k - n):
                whole = head + tail
                rest = np.prod([p(whole[:i])[whole[i]] for i in range(len(head), k + 1)])
                joint[whole] = joint.get(whole, 0.0) + weight * chance * float(rest)
    return joint


def distance(joint: dict[tuple[int, ...], float], p, length: int) -> float:
    """Total variation between `joint` and the target's own distribution of `length` tokens."""
    total = 0.0
    for whole in itertools.product(range(p.v), repeat=length):
        own = np.prod([p(whole[:i])[whole[i]] for i in range(length)])
        total += abs(joint.get(whole, 0.0) - float(own))
    return total / 2


@pytest.mark.parametrize(("v", "k"), [(2, 1), (2, 3), (3, 2), (4, 1), (4, 2), (6, 1), (3, 3)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_drafts_drawn_from_q_leave_the_target_distribution(v, k, seed):
    p, q = Tables(v, seed), Tables(v, seed + 100)
    joint = emitted(p, blocks(q, k), k, point=False, q=q)
    assert sum(joint.values()) == pytest.approx(1, abs=1e-12)
    assert distance(joint, p, k + 1) < 1e-12


@pytest.mark.parametrize(("v", "k"), [(2, 3), (4, 2), (6, 1), (3, 3), (6, 2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_point_mass_leaves_the_target_distribution(v, k, seed):
    p = Tables(v, seed)
    for drafts in itertools.product(range(v), repeat=k):
        joint = emitted(p, [(drafts, 1.0)], k, point=True)
        assert distance(joint, p, k + 1) < 1e-12


def test_the_enumeration_can_tell_a_biased_rule():
    # An argmax draft handed in as if it had been drawn from q: the known counter-example, total variation 0.21.
    p = [0.5, 0.3, 0.15, 0.05]
    q = [[0.7, 0.2, 0.05, 0.05]]
    got = np.zeros(4)
    for (n, token), chance in reference.outcomes([p, p], q, [0]).items():
        got[0 if n else token] += chance
    assert np.abs(got - p).sum() / 2 == pytest.approx(0.2143, abs=1e-4)


def cells(edges: np.ndarray):
    """Midpoints and lengths of the pieces into which `edges` cut [0, 1)."""
    edges = np.unique(np.clip([0.0, *edges, 1.0], 0, 1))
    return list(zip((edges[1:] + edges[:-1]) / 2, np.diff(edges), strict=True))


@pytest.mark.parametrize("point", [False, True])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_the_decision_itself_has_the_enumerated_probabilities(point, k):
    v = 4
    for seed in range(6):
        p_of, q_of = Tables(v, seed), Tables(v, seed + 50)
        rng = np.random.default_rng(seed)
        drafts = [int(rng.choice(v, p=q_of((i,)))) for i in range(k)]
        p = np.array([p_of((i,)) for i in range(k + 1)])
        q = None if point else np.array([q_of((i,)) for i in range(k)]).reshape(k, v)
        row = [None if point else q[i] for i in range(k)]
        keeps = [reference.keep_probability(p[i], row[i], x) for i, x in enumerate(drafts)]
        lefts = [reference.residual(p[i], row[i], x) for i, x in enumerate(drafts)] + [p[k]]
        v_cells = cells(np.concatenate([np.cumsum(w) / w.sum() for w in lefts]))
        got: dict[tuple[int, int], float] = {}
        for us in itertools.product(*(cells(np.array([a])) for a in keeps)):
            for at, length in v_cells:
                n, token = reference.accept_sampled(p, q, drafts, [u for u, _ in us], at)
                size = length * np.prod([w for _, w in us])
                got[int(n), int(token)] = got.get((int(n), int(token)), 0.0) + float(size)
        wanted = reference.outcomes(p, q, drafts)
        for key in set(got) | set(wanted):
            assert got.get(key, 0.0) == pytest.approx(wanted.get(key, 0.0), abs=1e-12)


@pytest.mark.parametrize("v", [2, 5, 64, 1000, 4096])
@pytest.mark.parametrize("point", [False, True])
def test_twin_equals_reference(v, point):
    rng = np.random.default_rng(v)
    for k in range(9):
        for _ in range(6):
            logits = rng.normal(size=(2 * k + 1, v)) * 3
            rows = np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float32)
            rows[rng.random(rows.shape) < 0.2] = 0
            rows[:, 0] += np.float32(1e-3)
            rows /= rows.sum(-1, keepdims=True)
            p, q = rows[: k + 1], rows[k + 1 :]
            drafts = np.array([rng.choice(v, p=(w := p[i].astype(float)) / w.sum()) for i in range(k)], np.int32)
            u = rng.random(k).astype(np.float32) * np.float32(0.6)
            uniform = float(np.float32(rng.random()))
            wanted = reference.accept_sampled(p, None if point else q, drafts, u, uniform)
            scores = None if point else mx.array(q.reshape(k, v))
            got = accept_sampled(mx.array(p), scores, mx.array(drafts), mx.array(u), uniform)
            assert got.dtype == mx.int32 and got.tolist() == wanted.tolist()


def test_no_id_without_mass_is_ever_drawn():
    weights = np.array([0, 0.25, 0, 0, 0.5, 0.25, 0], np.float32)
    edge = float(np.nextafter(np.float32(1), np.float32(0)))
    for at, token in ((0.0, 1), (0.2499, 1), (0.25, 4), (0.7499, 4), (0.75, 5), (edge, 5)):
        assert draw(mx.array(weights), at).item() == token == reference.draw(weights, at)


def test_point_mass_that_is_rejected_is_never_emitted():
    p = mx.array([[0.2, 0.5, 0.3], [1.0, 0, 0]])
    for v in np.linspace(0, 0.999, 50):
        verdict = read(accept_sampled(p, None, mx.array([1]), mx.array([0.6]), float(v)))
        assert verdict.accepted == 0 and verdict.token in (0, 2)


def test_certain_draft_is_kept_and_rounding_leaves_the_target_itself():
    p = mx.array([[0.0, 1, 0], [0, 0, 1.0]])
    assert read(accept_sampled(p, None, mx.array([1]), mx.array([0.999]), 0.5)).token == 2
    # p == q, and u * q rounds up to p: the rejection has no residual to draw from.
    one = mx.array([[0.0, 1, 0], [0, 0, 1.0]])
    verdict = read(accept_sampled(one, one[:1], mx.array([1]), mx.array([1.0]), 0.5))
    assert (verdict.accepted, verdict.token) == (0, 1)


def test_nan_or_massless_target_is_refused():
    for row in ([float("nan"), 0.5], [0.0, 0.0]):
        packed = accept_sampled(mx.array([row]), None, mx.array([], dtype=mx.int32), mx.array([]), 0.5)
        assert packed.tolist() == [0, -1] == reference.accept_sampled([row], None, [], [], 0.5).tolist()
        with pytest.raises(ModelError):
            read(packed)


def test_shapes_are_checked():
    p = mx.full((2, 3), 1 / 3)
    with pytest.raises(ValueError, match="q must have shape"):
        accept_sampled(p, p, mx.array([0]), mx.array([0.5]), 0.5)
    with pytest.raises(ValueError, match="u must have shape"):
        accept_sampled(p, None, mx.array([0]), mx.array([0.5, 0.5]), 0.5)
