"""What a plan says is what happens: every field of it reaches the rows, the steps and the files."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
import tiny
import trainlab
from mlx.utils import tree_flatten

from mtplab.models import load_target
from mtplab.train import collect, loop, plan, run, write
from mtplab.train.plan import HeadPlan
from mtplab.train.texts import Start, Texts
from mtplab.trials.progress import Progress


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("effect") / "llama", "llama")


@pytest.fixture(scope="module")
def rows(llama, tmp_path_factory):
    """A folder whose rows are collected: `rows(**changes)` -> Training on a new head, its plan."""
    loaded = load_target(llama)
    root, made = tmp_path_factory.mktemp("rows"), {}

    def get(**changes):
        planned = HeadPlan(model=str(llama), **trainlab.SMALL | {"steps": 12} | changes)
        key = (planned.seed, planned.rows, planned.temp)
        if key not in made:
            made[key] = root / str(len(made))
            made[key].mkdir()
            texts = Texts(planned, loaded.tokenizer, loaded.context)
            collect.collect(made[key], planned, loaded.target, texts, lambda *_: None)
        head, _ = write.new_head(loaded, planned.ffn)
        return loop.Training(made[key], planned, loaded.target, head)

    return get


def weights(training) -> dict[str, np.ndarray]:
    return {n: np.array(a) for n, a in tree_flatten(training.layer.parameters())}


def same(a, b) -> bool:
    return all(np.array_equal(a[n], b[n]) for n in a)


# Rows ----------------------------------------------------------------------------------------------------------------


def test_held_out_windows_are_in_their_file_and_in_no_other(rows, llama):
    """Read back from disk: how a row begins says which window it is of."""
    training = rows()
    texts = Texts(training.plan, load_target(llama).tokenizer, 4096)
    held, trained = ({p.tokens[:8] for p in texts.windows["c"][h]} for h in (True, False))
    begins = {tuple(row["tokens"][:8].tolist()) for part in training.rows.parts for row in part}
    assert begins <= trained and not begins & held
    assert {tuple(row["tokens"][:8].tolist()) for row in training.held} <= held


def test_every_row_of_every_file_is_taken(rows):
    training = rows()
    taken = training.rows.take(range(12))["tokens"]
    stored = np.concatenate([p["tokens"] for p in training.rows.parts])
    assert len(training.rows.parts) == 2 and np.array_equal(taken, stored)
    assert len({t.tobytes() for t in stored}) > 6


def test_temperature_and_seed_reach_the_sampled_rows(rows):
    plain = np.concatenate([p["tokens"] for p in rows().rows.parts])
    for changes in ({"temp": 5.0}, {"seed": 4}):
        other = np.concatenate([p["tokens"] for p in rows(**changes).rows.parts])
        assert not np.array_equal(plain, other), changes
    # Another temperature moves the sampled rows (the last two of four) and a text too short for its row, no greedy one.
    hot = np.concatenate([p["tokens"] for p in rows(temp=5.0).rows.parts])
    moved = {i % 4 for i in range(12) if not np.array_equal(plain[i], hot[i])}
    assert moved >= {2, 3} and 1 not in moved


def test_the_draws_of_a_row_depend_on_the_seed(load):
    start, made = [Start("c", "sampled", tuple(tiny.prompt(1, 8)))] * 2, []
    for seed in (3, 4):
        planned = HeadPlan(model="m", steps=1, **trainlab.SMALL | {"seed": seed})
        made.append(collect.generate(load("llama").target, planned, start, "x", lambda at: None))
    assert not np.array_equal(made[0]["tokens"], made[1]["tokens"])


# Steps ---------------------------------------------------------------------------------------------------------------


def test_the_trunk_stays_as_it_is(rows):
    training = rows()
    before = {n: np.array(a) for n, a in tree_flatten(training.target.model.parameters())}
    first = weights(training)
    for _ in range(3):
        training.step()
    assert not same(first, weights(training)), "or the test would show nothing"
    assert same(before, {n: np.array(a) for n, a in tree_flatten(training.target.model.parameters())})


def test_every_step_takes_other_rows(rows, monkeypatch):
    training, seen = rows(), []
    take = training.rows.take
    monkeypatch.setattr(training.rows, "take", lambda numbers: (seen.append(tuple(numbers)), take(numbers))[1])
    for _ in range(6):
        training.step()
    assert len(set(seen)) == 6 and len({n for batch in seen for n in batch}) > 6
    assert all(len(set(batch)) == 3 for batch in seen)
    other = rows(seed=4)
    taken = []
    monkeypatch.setattr(other.rows, "take", lambda numbers: (taken.append(tuple(numbers)), take(numbers))[1])
    other.step()
    assert taken[0] != seen[0]


def test_a_new_head_depends_on_the_seed(rows):
    training = rows()
    first = weights(training)
    loop.begin(training.layer, training.target, training.rows.take(range(12)), 3)
    assert same(first, weights(training))
    loop.begin(training.layer, training.target, training.rows.take(range(12)), 4)
    assert not same(first, weights(training))


def test_the_loss_is_taken_at_the_plans_depth_recursion_and_candidates(rows, monkeypatch):
    training, seen = rows(depth=2, candidates=20), []
    real = loop.chain.loss

    def loss(layer, target, batch, candidates, **options):
        seen.append(options)
        return real(layer, target, batch, candidates, **options)

    class Candidates(loop.chain.Candidates):
        def __init__(self, top, tokens, vocab, others, rng):
            seen.append((vocab, others))
            super().__init__(top, tokens, vocab, others, rng)

    monkeypatch.setattr(loop.chain, "loss", loss)
    monkeypatch.setattr(loop.chain, "Candidates", Candidates)
    training.step()
    assert seen == [(tiny.VOCAB, 20), {"depth": 2, "recursion": training.head.spec.recursion}]


def test_the_learning_rate_is_the_plans_times_the_schedule(rows):
    for lr in (0.02, 0.005):
        training = rows(lr=lr)
        training.at.step = 11
        training.step()
        muon, adam = (o.learning_rate.item() for o in training.optimizer.optimizers)
        assert muon == pytest.approx(lr * loop.schedule(11, 11 / 12)) and adam == pytest.approx(muon / 8)


def test_matrices_are_muons_and_vectors_adams(rows):
    training = rows()
    training.step()
    muon, adam = (dict(tree_flatten(o.state)) for o in training.optimizer.optimizers)
    assert "proj.weight.v" in muon and "embed_norm.weight.v" not in muon
    assert "embed_norm.weight.m" in adam and "proj.weight.m" not in adam


def test_a_large_gradient_is_clipped(rows, monkeypatch):
    training, seen = rows(), []
    real = training.optimizer.update
    monkeypatch.setattr(training, "value_and_grad", lambda *a: (mx.array(1.0), scaled(training.layer.parameters())))
    monkeypatch.setattr(training.optimizer, "update", lambda model, grads: (seen.append(grads), real(model, grads)))
    training.step()
    norm = sum(mx.square(g).sum() for _, g in tree_flatten(seen[0])) ** 0.5
    assert norm.item() == pytest.approx(loop.CLIP, rel=1e-3)


def scaled(parameters):
    from mlx.utils import tree_map

    return tree_map(lambda a: mx.full(a.shape, 1e3), parameters)


def test_minutes_are_minutes(rows):
    training = rows(steps=None, minutes=2.0)
    training.at.seconds = 30.0
    assert training.share == 0.25


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(llama, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, trainlab.make(out, llama, gather=30, rows=30)


def test_the_head_that_is_written_is_the_one_that_was_trained(finished, llama):
    out, _ = finished
    state = mx.load(str(out / loop.STATE))
    head = trainlab.loaded_with(llama, out).head
    trained = {n[5:]: a for n, a in state.items() if n.startswith("head.")}
    written = dict(tree_flatten(head.layers[0].parameters()))
    assert set(trained) == set(written)
    for name, a in trained.items():
        assert mx.array_equal(a.astype(mx.float16).astype(mx.float32), written[name]), name


def test_the_last_point_is_of_all_rows_that_are_to_be_looked_at(finished):
    curve = [json.loads(x) for x in (finished[0] / "curve.jsonl").read_text().splitlines()]
    assert [e["held_out_rows"] for e in curve] == [loop.CURVE_ROWS] * (len(curve) - 1) + [loop.FINAL_ROWS]


def test_the_curve_is_of_rows_that_were_held_out(finished, llama):
    out, made = finished
    loaded = trainlab.loaded_with(llama, out)
    planned = plan.open_plan(out, {})
    held = collect.open_rows(out / collect.HELD_OUT, planned, 32)
    got = loop.agreement(loaded.head, loaded.target, held[: loop.FINAL_ROWS], planned.depth)
    for key in ("match_text", "match_own", "overlap_own"):
        assert made["curve"][-1][key] == pytest.approx(got[key], abs=0.01), key


def test_the_width_of_the_mlp_is_the_plans(finished):
    config = json.loads((finished[0] / "head" / "config.json").read_text())
    stored = mx.load(str(finished[0] / "head" / "model.safetensors"))
    assert config["intermediate_size"] == 32 != tiny.LLAMA["intermediate_size"]
    assert stored["model.mtp_layers.0.mlp.up_proj.weight"].shape == (32, 32)


def test_collecting_alone_stops_before_the_training(tmp_path, llama):
    planned = HeadPlan(model=str(llama), steps=2, **trainlab.SMALL)
    told = run.train(tmp_path / "run", planned, Progress(quiet=True), resume=False, only_collect=True)
    assert told == {"folder": str(tmp_path / "run"), "rows": 12, "head": None}
    assert not {p.name for p in (tmp_path / "run").iterdir()} & {loop.STATE, loop.CURVE, run.HEAD}
    made = run.train(tmp_path / "run", planned, Progress(quiet=True), resume=True)
    assert made["curve"][-1]["step"] == 2


def test_the_trunk_runs_in_the_dtype_of_the_plan(tmp_path, llama, monkeypatch):
    asked = []
    monkeypatch.setattr(run, "load_target", lambda model, **o: (asked.append(o), load_target(model, **o))[1])
    trainlab.make(tmp_path / "run", llama, dtype="bfloat16", steps=1)
    assert asked == [{"head": "none", "dtype": "bfloat16"}]
