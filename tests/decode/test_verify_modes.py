"""Exact verify: row by row and serially the logits are one-token decoding's, bit for bit; at a fixed width every depth
has the bits of every other. Also where nothing is width-invariant: under simulated numerics, and under OpenBLAS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import helpers
import mlx.core as mx
import pytest
import tiny

from mtplab.backend import numerics
from mtplab.cli import main
from mtplab.decode import verify
from mtplab.decode.drafters.simple import ScriptedDrafter
from mtplab.decode.settings import Settings, check_verify
from mtplab.diagnose import probe
from mtplab.errors import RequestError
from mtplab.models.static import StaticKV
from mtplab.models.target import Target
from mtplab.trials.arms import Session, parse_arm
from mtplab.trials.plan import Plan

ROOT = Path(__file__).parents[2]
N = 24
PATTERNS = ([3], [1, 0, 2])


class Recorder:
    """A way of verifying that keeps the logits of every committed row."""

    def __init__(self, way):
        self.way, self.mode, self.vocab, self.rows = way, way.mode, way.vocab, []

    def forward(self, tokens, cache):
        out = self.way.forward(tokens, cache)
        self.rows.append((cache.length, out.logits))
        return out

    def committed(self, prompt: int) -> dict[int, mx.array]:
        """Position in the text -> logits of the row that stayed there (the last one fed at that position)."""
        found = {}
        for end, logits in self.rows:
            found |= {end - logits.shape[0] + i: logits[i] for i in range(logits.shape[0])}
        return {p: row for p, row in found.items() if prompt <= p < prompt + N - 1}


def run(way, prompt, future=None, pattern=None, k=3):
    """(tokens, logits by position) of the baseline, or of a scripted arm of depth k."""
    seen, cache = Recorder(way), way.new_cache(len(prompt) + N)
    settings = Settings(max_tokens=N)
    if future is None:
        records = helpers.run_baseline(seen, prompt, settings, cache=cache)
    else:
        drafter = ScriptedDrafter(future, pattern, tiny.VOCAB)
        records = list(helpers.run_speculative(seen, prompt, settings, drafter, k, cache=cache))
    return helpers.tokens_of(records), seen.committed(len(prompt))


def assert_same(got, wanted):
    assert got[0] == wanted[0]
    assert got[1].keys() == wanted[1].keys()
    assert all(mx.array_equal(got[1][p], wanted[1][p]).item() for p in wanted[1]), "logits, bit for bit"


@pytest.mark.parametrize(
    "kind, length, spec",
    [
        ("llama", 9, "splitk@*"),
        ("llama", 9, "noise:1e-2@*"),
        ("mimo", 9, "lowp@layers.1.*"),
        ("qwen3_5", 9, "noise:1e-2@*"),
        # A sliding window of 16: 6 tokens cross it during generation, 40 before it.
        ("gemma3_text", 6, "bf16acc:8@lm_head"),
        ("gemma3_text", 40, None),
    ],
)
def test_exact_ways_have_the_bits_they_promise(load, kind, length, spec):
    target, prompt = load(kind).target, tiny.prompt(3, length)
    with nullcontext() if spec is None else numerics.simulate(target, spec):
        ordinary = run(verify.Batched(target), prompt)
        future = [*ordinary[0], 1, 2, 3, 4]
        rowwise = probe.rowwise(target, 4, context=64)
        try:
            for way in (rowwise, verify.Serial(target)):
                for pattern in PATTERNS:
                    assert_same(run(way, prompt, future, pattern), ordinary)
        finally:
            rowwise.close()
        fixed = verify.Fixed(target, 4)
        baseline = run(fixed, prompt)
        future = [*baseline[0], 1, 2, 3, 4]
        for k, pattern in ((1, [0, 1]), (3, [3, 0, 2])):
            assert_same(run(fixed, prompt, future, pattern, k), baseline)


@pytest.fixture(scope="module")
def experts() -> Target:
    """A tiny mixture of experts: 8 of 16 for every row."""
    config = tiny.LLAMA | {
        "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 16, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "moe_intermediate_size": 16, "norm_topk_prob": True,
    }  # fmt: skip
    return Target(tiny.made(config))


# 4 rows ask 32 experts, row by row; 9 rows ask 72, which mlx-lm sorts by expert first.
@pytest.mark.parametrize("width", [4, 9])
@pytest.mark.parametrize("spec", [None, "splitk@*"])
def test_a_fixed_width_is_exact_with_experts_which_the_dummy_rows_ask_too(experts, width, spec):
    prompt, fixed = tiny.prompt(3, 12), verify.Fixed(experts, width)
    with nullcontext() if spec is None else numerics.simulate(experts, spec):
        baseline = run(fixed, prompt)
        future = [*baseline[0], *range(1, width + 1)]
        for k, pattern in ((1, [1, 0]), (3, [3, 0, 2, 1]), (width - 1, [width - 1, 0, 2])):
            assert_same(run(fixed, prompt, future, pattern, k), baseline)


def test_the_batched_way_is_not_exact_under_the_same_numerics(load):
    """Or the test above would show nothing."""
    target, prompt = load("llama").target, tiny.prompt(3, 9)
    with numerics.simulate(target, "splitk@*"):
        tokens, rows = run(verify.Batched(target), prompt)
        _, got = run(verify.Batched(target), prompt, [*tokens, 1, 2, 3, 4], [3])
    assert not all(mx.array_equal(got[p], rows[p]).item() for p in rows)


@pytest.mark.parametrize("kind, length", [("qwen3_5", 9), ("gemma3_text", 40), ("mimo", 9)])
def test_every_unit_row_by_row_leaves_the_cache_of_a_serial_run(load, kind, length):
    target, prompt = load(kind).target, tiny.prompt(5, length)
    future = helpers.tokens_of(helpers.run_baseline(target, prompt, Settings(max_tokens=N + 4)))
    for way in (verify.Rowwise(target, verify.units(target)), verify.Serial(target)):
        serial, cache, at = helpers.SerialStates(target, prompt + future), way.new_cache(), 0
        for t in prompt:  # no prefill in blocks: it would leave another order in a window
            target.forward(mx.array([t]), cache)
        for kept in (1, 2, 3, 1):
            with cache.attempt(3) as attempt:
                mx.eval(way.forward(mx.array(future[at : at + 3]), cache).logits, cache.arrays())
                attempt.keep(kept)
            at += kept
            leaves = [leaf for layer in cache.layers for leaf in helpers.flatten(layer)]
            for i, (leaf, wanted) in enumerate(zip(leaves, serial.states[cache.length - 1], strict=True)):
                helpers.compare(i, helpers.contents(leaf), wanted, exact=True)
        with pytest.raises(ZeroDivisionError), cache.attempt(2):
            way.forward(mx.array([1, 2]), cache)
            raise ZeroDivisionError
        assert cache.length == length + 7
        for i, (leaf, wanted) in enumerate(zip(leaves, serial.states[cache.length - 1], strict=True)):
            helpers.compare(i, helpers.contents(leaf), wanted, exact=True)


def test_only_what_cares_runs_row_by_row(load):
    target = load("llama").target
    with numerics.simulate(target, "noise:1e-3@layers.1.mlp.down_proj"):
        way = probe.rowwise(target, 3)
        seen = []
        undo = [
            verify.override(m, lambda inner, x, p=p: (seen.append((p, x.shape[1])), inner(x))[1])
            for p, (m, _) in numerics.linears(target.model).items()
        ]
        cache = way.new_cache()
        with cache.attempt(3):
            way.forward(mx.array([1, 2, 3]), cache)
        for restore in undo:
            restore()
        way.close()
    assert [u.path for u in way.units] == ["model.layers.1.mlp.down_proj"]
    assert way.effective()["verify_rowwise"] == ["model.layers.*.mlp.down_proj"] and "widths 2..3" in way.equal_to
    assert all(rows == 3 for _, rows in seen), "the wrapper outside of the way sees whole blocks"


def test_units_are_the_innermost_that_can_run_alone(load):
    paths = [u.path for u in verify.units(load("qwen3_5").target)]
    trunk = "language_model.model.layers."
    assert trunk + "0.linear_attn" in paths and trunk + "3.self_attn" in paths and "language_model.lm_head" in paths
    assert trunk + "0.mlp.up_proj" in paths and trunk + "0.mlp" not in paths and trunk + "0" not in paths
    tied = verify.units(load("mimo").target)
    assert tied[-1] == verify.Unit("model.embed_tokens", "as_linear")


def test_a_fixed_cache_masks_as_the_growing_one_does():
    kv = StaticKV(8, window=4, keep=1)
    kv.update_and_fetch(mx.ones((1, 1, 5, 2)), mx.ones((1, 1, 5, 2)))
    assert kv.make_mask(2).astype(mx.int32).tolist() == [[1, 0, 0, 1, 1, 1, 0, 0], [1, 0, 0, 0, 1, 1, 1, 0]]
    with pytest.raises(RequestError, match="has 8 rows and 9 are needed"):
        kv.update_and_fetch(mx.ones((1, 1, 4, 2)), mx.ones((1, 1, 4, 2)))


def test_a_cache_without_a_fixed_form_is_refused(load):
    loaded = load("llama", build={"head_dim": 32}, kv_bits=8, kv_group_size=32)
    with pytest.raises(RequestError, match="no form for QuantizedKVCache"):
        Session(loaded, parse_arm("baseline"), verify="fixed")


@pytest.mark.parametrize("mode", ["batched", "rowwise", "fixed", "serial"])
def test_records_hold_the_way_in_force(load, mode):
    loaded = load("mimo")
    settings, prompt = Settings(max_tokens=12), tiny.prompt(3, 9)
    base = Session(loaded, parse_arm("baseline"), verify=mode).request(prompt, request=0, settings=settings)
    for arm in ("depth0", "depth2", "adaptive", "ngram2"):
        request = Session(loaded, parse_arm(arm), verify=mode).request(prompt, request=0, settings=settings)
        assert request.tokens == base.tokens and request.settings["verify"] == base.settings["verify"] == mode
        assert request.settings["numerics"] is None and request.settings["verify_equals"]
        assert request.settings.get("verify_width") == (4 if mode == "fixed" else None)


def test_simulated_numerics_are_in_the_record(load):
    loaded = load("mimo")
    with numerics.simulate(loaded.target, "splitk@*"):
        request = Session(loaded, parse_arm("depth1")).request([1, 2, 3], request=0, settings=Settings(max_tokens=4))
    assert request.settings["numerics"] == ["simulated: split-K in 2 parts for blocks at *"]


def test_an_unknown_way_is_refused(capsys):
    with pytest.raises(RequestError, match="'exact' is not one of batched"):
        check_verify("exact")
    with pytest.raises(RequestError, match="'exact' is not one of"):
        Plan(verify="exact")
    assert main(["generate", "-p", "x", "--verify", "exact"]) == 2
    assert "'exact' is not one of batched, rowwise, fixed, serial" in capsys.readouterr().err


def test_a_plan_without_a_choice_is_the_plan_it_was():
    assert Plan().digest == Plan(verify="batched").digest != Plan(verify="rowwise").digest


@pytest.mark.parametrize("mode", ["rowwise", "fixed"])
def test_generate_says_what_its_output_is_equal_to(checkpoints, capsys, mode):
    arguments = ["generate", "--model", str(checkpoints("mimo")), "-p", "!#%", "-m", "12", "--depth", "2"]
    assert main([*arguments, "--verify", mode, "-o", "json"]) == 0
    captured = capsys.readouterr()
    settings = json.loads(captured.out.splitlines()[-1])["settings"]
    assert settings["verify"] == mode and f"verify {mode}: logits equal to" in captured.err


OPENBLAS = """
import json, sys
from mtplab import backend
info = backend.setup()
if info.kind != "openblas":
    print(json.dumps(None))
    sys.exit()
from mtplab.decode.settings import Settings
from mtplab.diagnose.locate import locate
from mtplab.models import load_target
from mtplab.trials.arms import Session, parse_arm
loaded = load_target("lab-mtp")
prompt = loaded.tokenizer.encode("The door was open, and")
first = locate(loaded.target, prompt, prompt[:4]).first_module
tokens = {}
for mode in ("rowwise", "fixed"):
    for arm in ("baseline", "depth3"):
        live = Session(loaded, parse_arm(arm), verify=mode)
        request = live.request(prompt, request=0, settings=Settings(max_tokens=48, ignore_eos=True))
        tokens.setdefault(mode, []).append(request.tokens)
print(json.dumps({"first": first, "tokens": tokens, "units": request.settings["verify"]}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="OpenBLAS is loaded on Linux only")
def test_under_openblas_too():
    """There rows are not bit-identical across widths by themselves; the two exact ways do not care."""
    environment = os.environ | {"MTPLAB_BLAS": "auto", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", OPENBLAS], capture_output=True, text=True, env=environment, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    if found is None:
        pytest.skip("OpenBLAS cannot be had here")
    assert found["first"] is not None, "on this machine something must care for the width, or nothing is shown"
    for runs in found["tokens"].values():
        assert len(runs[0]) == 48 and all(run == runs[0] for run in runs)
