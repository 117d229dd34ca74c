"""The canvas loop against denoisers that play a script: what is accepted, kept, stopped, cut and counted."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from canvas_scripted import MASK, VOCAB, Scripted, canvases, logits, play, steps

from mtplab.backend.clock import ScriptedClock
from mtplab.decode.canvas import denoise
from mtplab.decode.canvas_policy import CanvasPolicy
from mtplab.decode.settings import Settings
from mtplab.decode.stopping import Stops
from mtplab.errors import ModelError
from mtplab.records import canvas_metrics as m
from mtplab.records.types import Prefill

A, B = [4, 5, 6, 7], [4, 5, 9, 7]


def argmaxes(*canvases_by_step):
    """A denoiser that says these tokens, one canvas of tokens a step (the last one goes on), without any doubt."""
    return Scripted(lambda c, s, ids: logits(canvases_by_step[min(s, len(canvases_by_step) - 1)]), 4)


# Stop ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "stability", "used"),
    [
        ((A, A), 0, 1), ((A, A), 1, 2), ((A, B, B), 1, 3), ((A, B, A, A), 1, 4), ((A, A, B, B, B), 2, 5),
        ((A,), 3, 4), ((A, B, A, B, A, B), 1, 7),
    ],
)  # fmt: skip
def test_a_stability_of_k_needs_k_plus_1_identical_canvases(script, stability, used):
    records, _ = play(argmaxes(*script), CanvasPolicy(steps=20, canvas=4, stability=stability))
    (done,) = canvases(records)
    assert (done.steps, done.stop) == (used, "stable")
    assert done.tokens == tuple(script[min(used, len(script)) - 1])


def test_an_unsure_canvas_does_not_stop_however_stable():
    policy = CanvasPolicy(steps=6, canvas=4, confidence=0.005)
    records, _ = play(Scripted(lambda c, s, ids: logits(A, 2.0), 4), policy)
    assert (canvases(records)[0].steps, canvases(records)[0].stop) == (6, "cap")
    assert canvases(records)[0].tokens == tuple(A), "the last step's argmax, accepted or not"
    assert [s.flips for s in steps(records)] == [None, 0, 0, 0, 0, 0]


def test_positions_that_are_all_accepted_at_step_1_cost_one_step():
    for accept in ("entropy", "confidence", "count"):
        policy = CanvasPolicy(steps=1 if accept == "count" else 30, canvas=4, accept=accept, stop="accepted")
        denoiser = argmaxes(A)
        records, request = play(denoiser, policy)
        assert len(denoiser.seen) == 1 and m.forwards([request]) == (1, 1, 0)
        assert canvases(records)[0].stop == "accepted"


@pytest.mark.parametrize(
    ("accept", "number", "forced"),
    [("confidence", {"threshold": 0.99}, True), ("confidence", {"threshold": 0.001}, False),
     ("count", {"count": 1}, True), ("count", {"count": 2}, False), ("count", {}, False)],
)  # fmt: skip
def test_a_last_step_that_takes_what_it_would_not_have_taken_is_at_the_cap(accept, number, forced):
    policy = CanvasPolicy(steps=2, canvas=4, accept=accept, stop="accepted", finalise="kept", **number)
    # Somewhat sure: below 0.99 in every step, so that only the end of the steps fills the canvas.
    records, request = play(Scripted(lambda c, s, ids: logits(A, 4.0), 4), policy)
    assert canvases(records)[0].stop == ("cap" if forced else "accepted")
    assert steps(records)[-1].accepted == 4 and m.cap_share([request]) == forced


@pytest.mark.parametrize("accept", ["confidence", "count"])
def test_stop_none_runs_every_step_of_a_full_canvas_and_stable_ends_with_it(accept):
    sure = {"accept": accept, "finalise": "kept", "count": 4 if accept == "count" else None}
    denoiser = argmaxes(A, B)
    records, _ = play(denoiser, CanvasPolicy(steps=5, canvas=4, stop="none", **sure))
    (done,) = canvases(records)
    assert (done.steps, done.stop, len(denoiser.seen)) == (5, "cap", 5)
    assert done.tokens == tuple(A) and [s.new for s in steps(records)] == [4, 0, 0, 0, 0]
    records, _ = play(argmaxes(A, B), CanvasPolicy(steps=5, canvas=4, stop="stable", **sure))
    assert (canvases(records)[0].steps, canvases(records)[0].stop) == (1, "accepted")


# Acceptance over the steps ----------------------------------------------------------------------------------------


def wavering(c, s, ids):
    """Sure of position s at step s, and of another token for position 0 in every step."""
    tokens, sure = [10 + s, 11, 12, 13], [60.0 if i in (0, s) else 0.5 for i in range(4)]
    return logits(tokens, sure)


def test_a_revealed_position_persists_under_monotone_and_may_change_under_revocable():
    monotone = CanvasPolicy(steps=4, canvas=4, accept="confidence", threshold=0.9, stop="accepted", finalise="kept")
    denoiser = Scripted(wavering, 4)
    records, _ = play(denoiser, monotone)
    assert canvases(records)[0].tokens[0] == 10
    assert all(ids[0] == 10 for _, step, ids in denoiser.seen if step), "what was revealed is what the model sees"
    held = [set(s.held) for s in steps(records)]
    assert all(a <= b for a, b in pairwise(held))
    assert sum(s.new for s in steps(records)) == 4

    revocable = CanvasPolicy(steps=4, canvas=4, stop="none")
    records, _ = play(Scripted(wavering, 4), revocable)
    assert [s.tokens[0] for s in steps(records)] == [10, 11, 12, 13]
    assert canvases(records)[0].settled == (4, 1, 1, 1)
    assert steps(records)[1].flips == 1


def test_a_revocable_policy_takes_back_what_it_accepted():
    def script(c, s, ids):
        return logits(A, [60.0, 0.6, 60.0, 0.5] if s == 0 else [0.5, 60.0, 60.0, 0.6])

    policy = CanvasPolicy(steps=2, canvas=4, bound=0.01, stop="none")
    denoiser = Scripted(script, 4)
    records, _ = play(denoiser, policy)
    # The bound is on what the others tell about the least sure one, so one unsure position always comes along.
    assert [s.held for s in steps(records)] == [(0, 1, 2), (1, 2, 3)]
    assert [s.new for s in steps(records)] == [3, 1]
    assert (denoiser.seen[1][2] == np.array(A))[[0, 2]].all()


@pytest.mark.parametrize("count", [None, 3])
@pytest.mark.parametrize("total", [1, 2, 3, 7, 8, 20])
def test_a_masked_canvas_is_filled_exactly_once(total, count):
    def script(c, s, ids):
        open_ = ids == MASK
        assert (ids[~open_] < MASK).all()
        return logits([(7 * i + s) % 30 for i in range(8)], [1 + 0.1 * i for i in range(8)])

    policy = CanvasPolicy(
        steps=total, canvas=8, accept="count", count=count, proposal="argmax", renoise="mask", stop="accepted",
        finalise="kept", schedule="constant", t_max=1.0, t_min=1.0,
    )  # fmt: skip
    denoiser = Scripted(script, 8, masked=True)
    records, _ = play(denoiser, policy)
    found = steps(records)
    assert (denoiser.seen[0][2] == MASK).all()
    assert sum(s.new for s in found) == 8 and found[-1].accepted == 8
    assert all(s.new >= 1 for s in found) and len(found) <= total
    assert MASK not in canvases(records)[0].tokens
    # Each position holds the token of the step at which it was revealed, and of no other.
    revealed = {p: s.index for before, s in zip([None, *found], found, strict=False)
                for p in set(s.held) - set(before.held if before else ())}  # fmt: skip
    assert canvases(records)[0].tokens == tuple((7 * i + revealed[i]) % 30 for i in range(8))
    assert canvases(records)[0].settled == tuple(revealed[i] + 1 for i in range(8))


def test_mask_ids_stand_wherever_nothing_is_accepted():
    policy = CanvasPolicy(steps=4, canvas=4, accept="count", proposal="argmax", renoise="mask", finalise="kept")
    denoiser = Scripted(lambda c, s, ids: logits(A, [4.0, 3.0, 2.0, 1.0]), 4, masked=True)
    play(denoiser, policy)
    assert [ids.tolist() for _, _, ids in denoiser.seen] == [
        [MASK] * 4, [4, MASK, MASK, MASK], [4, 5, MASK, MASK], [4, 5, 6, MASK],
    ]  # fmt: skip


def test_renoising_replaces_what_is_not_accepted_and_none_leaves_it():
    def script(c, s, ids):
        return logits(A, [60.0, 0.5, 0.4, 0.4])

    for renoise, same in (("uniform", False), ("none", True)):
        denoiser = Scripted(script, 4)
        play(denoiser, CanvasPolicy(steps=3, canvas=4, bound=0.01, stop="none", renoise=renoise))
        first, second = denoiser.seen[0][2], denoiser.seen[1][2]
        assert second[0] == 4
        assert bool((first[2:] == second[2:]).all()) is same


# Ends ------------------------------------------------------------------------------------------------------------

C = 5


@pytest.mark.parametrize("wanted", [1, C - 1, C, C + 1, 3 * C + 5, 3 * C + 2])
def test_exactly_the_tokens_asked_for_and_the_same_ones(wanted):
    def script(c, s, ids):
        return logits([(c * C + i) % 30 for i in range(C)])

    denoiser = Scripted(script, C)
    records, request = play(denoiser, CanvasPolicy(canvas=C, steps=4), max_tokens=wanted)
    assert request.tokens == tuple(i % 30 for i in range(wanted)) and request.finish == "cap"
    count = -(-wanted // C)
    assert [c.length for c in canvases(records)] == [C] * count
    assert [c.valid for c in canvases(records)] == [C] * count
    assert len(denoiser.commits) == count - 1, "nothing follows the last canvas, so nothing is committed for it"
    assert [c.position for c in canvases(records)] == [C * i for i in range(count)]
    assert m.forwards([request]) == (1, 2 * count, count - 1)
    per = m.tokens_per_forward([request])
    assert per.without_prefill == C * count / (3 * count - 1)
    assert per.with_prefill == C * count / (3 * count) and per.emitted == wanted / (3 * count)


@pytest.mark.parametrize(
    ("where", "returned"), [((0, 0), 1), ((0, 4), 5), ((1, 0), 6), ((1, 2), 8), (None, 13)],
)  # fmt: skip
def test_eos_first_last_inside_and_absent(where, returned):
    def script(c, s, ids):
        tokens = [10 + c] * C
        if where and c == where[0]:
            tokens[where[1]] = 2
        return logits(tokens)

    denoiser = Scripted(script, C)
    records, request = play(denoiser, CanvasPolicy(canvas=C, steps=3), eos=[2], max_tokens=13)
    last = canvases(records)[-1]
    assert len(request.tokens) == returned and request.finish == ("eos" if where else "cap")
    assert (last.eos, last.valid) == ((where[1], where[1] + 1) if where else (None, C))
    assert len(last.tokens) == C, "the whole canvas stays in the record"
    ignored = play(Scripted(script, C), CanvasPolicy(canvas=C, steps=3), eos=[2], max_tokens=13, ignore_eos=True)[1]
    assert len(ignored.tokens) == 13


def test_repetition_that_the_model_means_is_not_cut():
    _, request = play(Scripted(lambda c, s, ids: logits([8] * C), C), CanvasPolicy(canvas=C), max_tokens=3 * C)
    assert request.tokens == (8,) * (3 * C) and m.repetition(request.tokens) == (14, 14)


def test_a_stop_string_ends_the_text_inside_a_canvas():
    def decode(tokens):
        return "".join(chr(65 + t) for t in tokens)

    denoiser = Scripted(lambda c, s, ids: logits([0, 1, 2, 3, 4]), C)
    _, request = play(denoiser, CanvasPolicy(canvas=C), max_tokens=20, stop=("CD",), decode=decode)
    assert decode(request.tokens) == "ABCD" and request.finish == "stop"


def test_a_canvas_is_handed_over_as_it_commits():
    denoiser = Scripted(lambda c, s, ids: logits([c] * C), C)
    settings = Settings(max_tokens=3 * C)
    loop = denoise(
        denoiser, [1], policy=CanvasPolicy(canvas=C), settings=settings, stops=Stops(settings), clock=ScriptedClock(1)
    )
    seen = []
    for record in loop:
        if hasattr(record, "emitted_tokens"):
            seen.append((record.index, len(denoiser.commits), max(c for c, _, _ in denoiser.seen)))
    assert seen == [(0, 1, 0), (1, 2, 1), (2, 2, 2)], "no pass of a later canvas had run"


def test_self_conditioning_begins_anew_with_every_canvas():
    denoiser = Scripted(lambda c, s, ids: logits(A), 4)
    play(denoiser, CanvasPolicy(canvas=4, steps=3, stop="none"), max_tokens=8)
    assert denoiser.conditioned == [False, True, True, False, True, True]
    denoiser = Scripted(lambda c, s, ids: logits(A), 4)
    denoiser.self_conditioning = False
    play(denoiser, CanvasPolicy(canvas=4, steps=3, stop="none"))
    assert denoiser.conditioned == [False] * 3


def test_times_are_the_clocks_and_counts_the_loops():
    records, request = play(argmaxes(A), CanvasPolicy(canvas=4, steps=5), max_tokens=8)
    # One reading a millisecond: step = 1 ms, commit = 1 ms; prefill, 2 x (start, 2 x 2 steps, end), one commit.
    assert [s.step_ns for s in request.steps] == [1_000_000] * 4
    assert [c.commit_ns for c in request.canvases] == [1_000_000, None]
    assert isinstance(records[0], Prefill) and records[0].forwards == 1 and records[0].emitted == 0
    assert m.tok_s([request]) == pytest.approx(1e3 * 8 / m.generation_ms(request))
    short = play(argmaxes(A), CanvasPolicy(canvas=4, steps=5), max_tokens=5)[1]
    assert m.positions_s([short]) / m.tok_s([short]) == pytest.approx(8 / 5)


# Randomness -------------------------------------------------------------------------------------------------------


def open_minded(c, s, ids):
    """Flat enough for the draws to matter, and dependent on what stands on the canvas."""
    out = np.random.default_rng(int(ids.sum()) % 1000).normal(0, 3, (4, VOCAB)).astype(np.float32)
    return out


def tokens_of(seed, total=6, *, disturb=False, request=0, shown=False):
    settings = Settings(max_tokens=12, seed=seed)
    denoiser = Scripted(open_minded, 4)
    loop = denoise(
        denoiser, [1], policy=CanvasPolicy(canvas=4, steps=total), settings=settings, stops=Stops(settings),
        clock=ScriptedClock(1), request=request,
    )  # fmt: skip
    out = []
    for record in loop:
        if disturb:
            mx.random.seed(7)
            mx.eval(mx.random.normal((3,)))
        if shown:
            str(record)
        out += getattr(record, "emitted_tokens", ())
    return out, denoiser


def test_the_same_seed_gives_the_same_tokens_whoever_else_draws_or_watches():
    tokens, _ = tokens_of(3)
    assert tokens == tokens_of(3)[0] == tokens_of(3, disturb=True)[0] == tokens_of(3, shown=True)[0]
    others = [tokens_of(seed)[1].seen[0][2].tolist() for seed in range(5)]
    assert len({tuple(x) for x in others}) == 5
    assert tokens_of(3, request=1)[1].seen[0][2].tolist() != tokens_of(3)[1].seen[0][2].tolist()


def test_canvas_0_of_16_and_of_48_steps_starts_from_the_same_noise():
    starts = [tokens_of(5, total)[1].seen[0][2].tolist() for total in (1, 16, 48)]
    assert starts[0] == starts[1] == starts[2]


def test_logits_that_are_no_numbers_are_named():
    def script(c, s, ids):
        out = logits(A)
        if s == 1:
            out[2, 3] = np.nan
        return out

    with pytest.raises(ModelError, match="not finite in canvas 0, step 1"):
        play(Scripted(script, 4), CanvasPolicy(canvas=4, steps=5))


def test_a_trace_changes_nothing_and_reads_back(tmp_path):
    from mtplab.trials.trace import TraceWriter, read_trace

    def loop():
        settings = Settings(max_tokens=12, seed=3)
        return denoise(
            Scripted(open_minded, 4), [1], policy=CanvasPolicy(canvas=4, steps=6), settings=settings,
            stops=Stops(settings), clock=ScriptedClock(1),
        )  # fmt: skip

    with TraceWriter(tmp_path / "trace.jsonl") as trace:
        watched = list(trace.watch(loop(), request="0"))
    assert watched == list(loop())
    assert [record for _, record in read_trace(tmp_path / "trace.jsonl")] == watched
