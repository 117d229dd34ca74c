"""The bundled model: what its card claims, and parity with the torch twin that trained it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import helpers
import mlx.core as mx
import numpy as np
import pytest

from mtplab.decode.drafters.mtp import MTPDrafter
from mtplab.decode.quality import agreement
from mtplab.decode.selection import Draws
from mtplab.decode.settings import Settings
from mtplab.models import DATA, bundled
from mtplab.models.loader import load_target

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def lab():
    return load_target(bundled("lab-mtp"), head="require")


@pytest.fixture(scope="module")
def prompts(lab):
    out = {}
    for kind in ("novel", "c"):
        lines = (DATA / "corpora" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        out[kind] = [lab.tokenizer.encode(json.loads(line)["text"]) for line in lines]
    return out


def test_it_fits_and_says_what_it_is():
    folder = bundled("lab-mtp")
    assert sum(p.stat().st_size for p in folder.iterdir()) <= 12e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    for word in ("perplexity", "match", "overlap", "public domain", "evaluate.py"):
        assert word in card


def test_it_learned_both_texts(lab, prompts):
    """Held-out prompts are far from uniform (perplexity 4,096) and C is the easier text."""
    loss = {}
    for kind, rows in prompts.items():
        each = []
        for ids in rows:
            logits = lab.target.forward(mx.array(ids[:-1]), lab.target.new_cache()).logits
            picked = mx.take_along_axis(logits, mx.array(ids[1:])[:, None], axis=-1)[:, 0]
            each.append((mx.logsumexp(logits, axis=-1) - picked).mean().item())
        loss[kind] = float(np.mean(each))
    assert loss["c"] < loss["novel"] < math.log(200)


def torch_twin(lab):
    torch = pytest.importorskip("torch", reason="torch is the reference of this parity test (pip install '.[test]')")
    sys.path.insert(0, str(ROOT / "experiments" / "000_lab_mtp"))
    try:
        from model import Config, LabMTP
    finally:
        sys.path.pop(0)
    from safetensors.torch import load_file

    twin = LabMTP(Config())
    twin.load_state_dict({k: v.float() for k, v in load_file(str(lab.folder / "model.safetensors")).items()})
    return torch, twin.eval()


def test_trunk_and_chained_head_equal_the_torch_twin(lab, prompts):
    """Trunk logits, and teacher-forced head logits at depth 1, 2, 3 on the cache a draft would see, within 1e-4."""
    torch, twin = torch_twin(lab)
    from mtplab.decode import quality

    for kind in ("novel", "c"):
        ids = prompts[kind][0][:48]
        with torch.no_grad():
            batch = torch.tensor([ids])
            hidden = twin.hidden(batch)
            wanted = [d[0].numpy() for d in twin.drafts(batch, hidden)]
            trunk = twin.unembed(hidden)[0].numpy()
        out = lab.target.forward(mx.array(ids), lab.target.new_cache())
        assert np.abs(np.array(out.logits) - trunk).max() < 1e-4
        cache = lab.head.new_cache()
        for t in range(len(ids) - 4):
            rows = quality._chain(lab.head, mx.array(ids), out.hidden, cache, t, 3)
            for d, row in enumerate(rows):
                assert np.abs(np.array(row[0]) - wanted[d][t]).max() < 1e-4, (t, d)


def test_priming_raises_agreement(lab, prompts):
    """The rows right after the prompt: what the trunk's hidden state does not carry, the primed cache does."""
    overlap = {}
    for prime in (True, False):
        for kind in ("novel", "c"):
            total = None
            for ids in prompts[kind][:8]:
                start = len(ids) // 2
                got = agreement(lab.target, lab.head, ids[: start + 20], start=start, temp=0.8, prime=prime)
                total = got if total is None else total + got
            overlap[kind, prime] = total.overlap
    assert all(a > b + 0.005 for a, b in zip(overlap["novel", True], overlap["novel", False], strict=True))
    assert all(a > b + 0.03 for a, b in zip(overlap["c", True], overlap["c", False], strict=True))


def test_point_drafts_stand_more_often_on_code_than_on_prose(lab, prompts):
    """Where the texts differ: under temperature a greedy draft stands with the trunk's probability of it. A draft drawn
    from this distilled head stands with the overlap, which is higher on both."""
    settings, share = Settings(max_tokens=24, temp=0.8, ignore_eos=True), {}
    for drafts in ("point", "sampled"):
        for kind in ("novel", "c"):
            passes = []
            for i, ids in enumerate(prompts[kind][:8]):
                drafter = MTPDrafter(lab.head, settings, Draws(0, i), drafts=drafts)
                passes += list(helpers.run_speculative(lab.target, ids, settings, drafter, 1, request=i))[1:]
            share[drafts, kind] = sum(r.accepted for r in passes) / len(passes)
    assert share["point", "c"] > share["point", "novel"] > 0.1
    assert share["sampled", "c"] > share["point", "c"] and share["sampled", "novel"] > share["point", "novel"]


def test_the_head_agrees_with_its_trunk_as_the_card_says(lab, prompts):
    """Held-out prompts, teacher-forced: about 0.67 at every depth."""
    for kind in ("novel", "c"):
        total = None
        for ids in prompts[kind][:6]:
            got = agreement(lab.target, lab.head, ids[:80], start=16)
            total = got if total is None else total + got
        assert all(m > 0.55 for m in total.match) and all(o > 0.65 for o in total.overlap)


def test_greedy_equals_the_baseline_on_real_text(lab, prompts):
    for kind in ("novel", "c"):
        ids, settings = prompts[kind][1], Settings(max_tokens=64, ignore_eos=True)
        expected = helpers.tokens_of(helpers.run_baseline(lab.target, ids, settings))
        for k in (1, 3):
            drafter = MTPDrafter(lab.head, settings, Draws(0, 0))
            records = list(helpers.run_speculative(lab.target, ids, settings, drafter, k))
            assert helpers.tokens_of(records) == expected
            assert sum(r.accepted for r in records[1:]) > 0


def test_text_survives_the_tokenizer(lab):
    for text in ("int main(void){\n\treturn 0x1F;\n}\n", "Ahab's \u2014 caf\u00e9 \U0001f40b", ""):
        ids = lab.tokenizer.encode(text)
        assert lab.tokenizer.decode(ids) == text
        stream = lab.tokenizer.stream()
        assert "".join(stream.add(t) for t in ids) + (stream.flush() if ids else "") == text
    long = "\u00e9\U0001f40b x" * 60
    stream = lab.tokenizer.stream()
    assert "".join([*(stream.add(t) for t in lab.tokenizer.encode(long)), stream.flush()]) == long
