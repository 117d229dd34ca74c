"""The probe names exactly what cares for the width, and says how much it looked at."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
import tiny
from latent import mla

from mtplab.backend import numerics
from mtplab.backend.instances import override
from mtplab.cli import main
from mtplab.cli.probe import parse_widths
from mtplab.diagnose.probe import probe, rowwise
from mtplab.errors import ModelError, RequestError
from mtplab.report.probe import ranges, sentences

FEW = (1, 2, 3, 4)


def variant(found):
    return [o.example for o in found.operations if not o.invariant]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_on_the_reference_blas_nothing_cares_and_the_control_is_seen(load, kind):
    found = probe(load(kind).target, widths=FEW)
    assert variant(found) == [] and found.variant == () and found.reproducible and found.numerics == ()
    assert found.control["seen"] and found.control["differ"] > 0, "or this instrument sees nothing"
    assert all(o.equal_widths == list(FEW) and all(s[0] for s in o.by_width.values()) for o in found.operations)
    kinds = {o.kind for o in found.operations}
    assert kinds >= {"linear", "norm", "attention", "unembedding"}
    assert ("recurrent mixer" in kinds) == (kind == "qwen3_5")


def test_every_module_is_counted_once(load):
    found = probe(load("llama").target, widths=(2,))
    counts = {(o.kind, o.shape): o.count for o in found.operations}
    assert counts["linear", (32, 32)] == 6 and counts["linear", (16, 32)] == 6 and counts["linear", (48, 32)] == 6
    assert counts["attention", ()] == 3 and counts["unembedding", (tiny.VOCAB, 32)] == 1


def test_simulated_numerics_are_found_where_they_are(load):
    target = load("mimo").target
    with numerics.simulate(target, "splitk@layers.1.mlp.down_proj"):
        found = probe(target, widths=FEW)
    (bad,) = [o for o in found.operations if not o.invariant]
    assert bad.example == "model.layers.1.mlp.down_proj" and bad.count == 1 and bad.simulated == found.numerics
    assert bad.equal_widths == [1] and [u.path for u in found.variant] == [bad.example]
    assert bad.rows[3] <= {0, 1, 2} and 0 < bad.by_width[4][1] < bad.by_width[4][0]


def test_the_attention_is_judged_without_its_linears(load):
    target = load("llama").target
    with numerics.simulate(target, "noise:1e-2@layers.*.self_attn.q_proj"):
        found = probe(target, widths=(1, 3))
    assert [o.kind for o in found.operations if not o.invariant] == ["linear"]


@pytest.mark.parametrize("row", [-1, 1])
@pytest.mark.parametrize("path", ["model.layers.0.mlp.down_proj", "model.layers.0.self_attn"])
def test_an_operation_that_differs_at_one_place_of_a_block_is_named_with_the_row(load, path, row):
    """The first row of every block keeps its bits: who compares no other sees nothing."""
    target = load("llama").target

    def bent(inner, x, *rest, **more):
        y, rows = inner(x, *rest, **more), x.shape[1]
        here = (mx.arange(rows) == row % rows)[None, :, None]
        return mx.where(here, y * (1 + 2.0**-20), y) if rows > 2 else y

    undo = override(dict(target.model.named_modules())[path], bent)
    try:
        found = probe(target, widths=FEW)
    finally:
        undo()
    (bad,) = [o for o in found.operations if not o.invariant]
    assert bad.example == path and bad.equal_widths == [1, 2]
    assert bad.rows == {3: {row % 3}, 4: {row % 4}}


def test_algorithms_that_differ_by_width_on_every_machine_are_found(load):
    window = probe(load("gemma3_text").target, widths=(1, 4))
    assert [(o.kind, o.example) for o in window.operations if not o.invariant] == [
        ("attention", "model.layers.0.self_attn")
    ]
    assert [u.path for u in window.variant] == ["model.layers.0.self_attn", "model.layers.2.self_attn"], "the windows"
    found = probe(mla(), widths=(1, 4))
    assert {o.kind for o in found.operations if not o.invariant} == {"attention"} and len(found.variant) == 3


def test_a_model_that_is_not_reproducible_is_said_so_and_cannot_be_exact(load):
    target = load("llama").target
    with numerics.simulate(target, "jitter:1e-3@lm_head"):
        found = probe(target, widths=(1, 2))
        assert not found.reproducible and "NOT reproducible" in " ".join(sentences(found.to_json()))
        with pytest.raises(ModelError, match="no verify can be exact"):
            rowwise(target, 3)
    classes = [type(m) for _, m in target.model.named_modules()]
    assert probe(target, widths=(1, 2)).reproducible
    assert [type(m) for _, m in target.model.named_modules()] == classes


def test_too_few_seeds_and_impossible_widths_are_refused(load):
    with pytest.raises(RequestError, match="2 seed"):
        probe(load("llama").target, seeds=2)
    with pytest.raises(RequestError, match=r"1\.\.64"):
        probe(load("llama").target, widths=(0, 2))


def test_the_verb(checkpoints, capsys):
    folder = str(checkpoints("mimo"))
    arguments = ["probe", "--model", folder, "--widths", "1-3", "--simulate", "noise:1e-3@layers.0.mlp.up_proj"]
    assert main([*arguments, "-o", "json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out.splitlines()[-1])
    assert document["variant"] == ["layers.*.mlp.up_proj"] and document["seeds"] == 3 and document["control"]["seen"]
    assert document["numerics"][0].startswith("simulated: noise") and "seed 3 of 3" in captured.err
    assert document["machine"]["blas"]["kind"] == "reference" and document["model"]["dtype"] == "float32"
    assert main([*arguments, "-q"]) == 0
    text = capsys.readouterr().out
    assert "(simulated)" in text and "In force: simulated: noise" in text and "elements compared" in text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--widths", "0-4"], "--widths '0-4'"),
        (["--widths", "4-2"], "--widths '4-2'"),
        (["--seeds", "1"], "1 seed(s)"),
        (["--simulate", "magic@*"], "'magic@*'"),
        (["--output", "xml"], "'xml'"),
    ],
)
def test_wrong_requests_are_refused(capsys, arguments, words):
    assert main(["probe", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_widths_and_ranges():
    assert parse_widths("1-4,8") == [1, 2, 3, 4, 8] and parse_widths(" 2 ") == [2]
    assert ranges([8, 1, 2, 3]) == "1-3, 8" and ranges([]) == ""
