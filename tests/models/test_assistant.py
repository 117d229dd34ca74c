"""The Gemma 4 pair: the assistant reads the target's keys and values; equal to transformers, and exact in the loop."""

from __future__ import annotations

import json
import shutil

import helpers
import mlx.core as mx
import numpy as np
import published
import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file

from mtplab.decode.drafters.assistant import AssistantDrafter
from mtplab.decode.policy import AdaptiveDepth
from mtplab.decode.selection import Draws
from mtplab.decode.settings import Settings
from mtplab.errors import ModelError, RequestError
from mtplab.models.inspect import inspect_checkpoint
from mtplab.models.loader import load_target
from mtplab.trials.arms import Session, parse_arm

WINDOW = 8
TEXT = {
    "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW,
    "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "enable_moe_block": False,
    "use_double_wide_mlp": False, "attention_k_eq_v": False, "num_global_key_value_heads": None,
    "tie_word_embeddings": True,
}  # fmt: skip
PATTERN = ["sliding_attention", "full_attention"]


def write(folder, model, config):
    """As published, with mtplab's tokenizer file."""
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tiny.byte_tokenizer()))


def randomized(model, seed):
    model = model.eval()
    published.randomize(model, seed)
    return model


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "ordered"])
def pair(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("gemma")
    config = transformers.Gemma4TextConfig(
        **TEXT, num_hidden_layers=6, num_kv_shared_layers=2, layer_types=PATTERN * 3, final_logit_softcapping=30.0
    )
    main = randomized(transformers.Gemma4ForCausalLM(config), 0)
    small = transformers.Gemma4TextConfig(
        **TEXT | {"num_attention_heads": 2}, num_hidden_layers=4, num_kv_shared_layers=4, layer_types=PATTERN * 2
    )
    extra = {"use_ordered_embeddings": True, "num_centroids": 97, "centroid_intermediate_top_k": 20}
    whole = transformers.Gemma4AssistantConfig(
        text_config=small, backbone_hidden_size=32, **(extra if request.param else {})
    )
    assistant = randomized(transformers.Gemma4AssistantForCausalLM(whole), 1)
    if request.param:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(tiny.VOCAB))
    # As published: the two head sizes by name, where transformers writes them per layer.
    write(root / "target", main, json.loads(config.to_json_string()) | TEXT | {"model_type": "gemma4_text"})
    described = json.loads(whole.to_json_string())
    described["text_config"] |= TEXT | {"num_attention_heads": 2}
    write(root / "assistant", assistant, described)
    return root, main, assistant


@pytest.fixture(scope="module")
def loaded(pair):
    return load_target(pair[0] / "target", assistant=pair[0] / "assistant")


@torch.no_grad()
def theirs(main, assistant, tokens, drafts):
    """transformers' loop over the rows before the last token, at that token's position."""
    # output_hidden_states: else transformers cuts the rows of layers that share KV, and fails without per-layer input.
    asked = {"use_cache": False, "return_shared_kv_states": True, "output_hidden_states": True}
    out = main.model(torch.tensor([tokens[:-1]]), **asked)
    # The rows a window holds. transformers would look one row further back here, where it has the whole text, but
    # not in `generate`, where its cache has cut the text to a window.
    kv = {k: tuple(a[:, :, -WINDOW:] if "sliding" in k else a for a in v) for k, v in out.shared_kv_states.items()}
    hidden, token = out.last_hidden_state[:, -1:], torch.tensor([tokens[-1:]])
    position, logits = torch.tensor([[len(tokens) - 1]]), []
    for _ in range(drafts):
        embeds = torch.cat([main.get_input_embeddings()(token), hidden], dim=-1)
        step = assistant(inputs_embeds=embeds, position_ids=position, shared_kv_states=kv)
        logits.append(step.logits[0, 0])
        hidden, token = step.last_hidden_state, step.logits.argmax(dim=-1)
    return torch.stack(logits).numpy()


def test_target_is_transformers(pair, loaded):
    tokens = tiny.prompt(1, 24)
    with torch.no_grad():
        wanted = pair[1](torch.tensor([tokens]), output_hidden_states=True).logits[0].numpy()
    out = loaded.target.forward(mx.array(tokens), loaded.target.new_cache())
    np.testing.assert_allclose(np.array(out.logits), wanted, atol=1e-4)
    assert wanted.std() > 1


@pytest.mark.parametrize("length", [3, 6, WINDOW, WINDOW + 1, 24])
@pytest.mark.parametrize("serial", [False, True])
def test_assistant_is_transformers_at_depth_1_to_3(pair, loaded, length, serial):
    """Whether the window was filled as one block or as a ring, and past it."""
    tokens, target, cache = tiny.prompt(2, length), loaded.target, loaded.target.new_cache()
    wanted = theirs(*pair[1:], tokens, 3)
    blocks = [[t] for t in tokens[:-1]] if serial else [tokens[:-1]]
    for block in blocks:
        out = target.forward(mx.array(block), cache)
        mx.eval(out.hidden, cache.arrays())
    hidden, token, shared = out.hidden[-1:], mx.array(tokens[-1:]), loaded.head.shared(cache)
    for d in range(3):
        hidden, logits = loaded.head.step(token, hidden, shared, cache.length)
        np.testing.assert_allclose(np.array(logits[0]), wanted[d], atol=1e-4)
        token = mx.argmax(logits, axis=-1)


@pytest.mark.parametrize("length", [6, 24])
def test_the_loop_equals_the_baseline_and_drafts_what_transformers_drafts(pair, loaded, length):
    prompt, settings = tiny.prompt(3, length), Settings(max_tokens=20)
    expected = helpers.tokens_of(helpers.run_baseline(loaded.target, prompt, settings))
    for policy in (1, 2, 3, AdaptiveDepth(3)):
        cache = loaded.target.new_cache()
        drafter = AssistantDrafter(loaded.head, cache, settings, Draws(0, 0))
        records = list(helpers.run_speculative(loaded.target, prompt, settings, drafter, policy, cache=cache))
        assert helpers.tokens_of(records) == expected
        known = [*prompt, *helpers.tokens_of(records[:1])]
        for i, r in enumerate(records[1:]):
            if policy == 3 and i % 3 == 0 and r.proposed == 3:
                assert list(r.drafts) == theirs(*pair[1:], known, 3).argmax(axis=-1).tolist()
            known += r.emitted_tokens


def test_arms_and_facts(loaded):
    session = Session(loaded, parse_arm("depth2"))
    request = session.request(tiny.prompt(4, 9), request=0, settings=Settings(max_tokens=12))
    plain = Session(loaded, parse_arm("baseline"))
    baseline = plain.request(tiny.prompt(4, 9), request=0, settings=Settings(max_tokens=12))
    assert request.tokens == baseline.tokens
    assert loaded.facts["head"]["family"] == "gemma4_assistant"
    assert loaded.facts["head"]["reads"] == {"full_attention": 3, "sliding_attention": 2}, "the last that keep KV"


def test_inspect_says_where_the_drafter_is(pair):
    target, assistant = (inspect_checkpoint(pair[0] / n) for n in ("target", "assistant"))
    assert "--assistant" in target["arms"]["depth1..8"] and target["arms"]["baseline"] == "yes"
    assert target["cache"]["layers"] == {"sliding": 2, "full": 2, "stateless": 2}
    assert "--assistant beside the target" in assistant["arms"]["baseline"]


@pytest.mark.parametrize("order", ["twice", "past the end", "negative", "floats"])
def test_an_ordering_that_is_no_permutation_is_refused(pair, tmp_path, order):
    """It indexes the tables: an id past their end would be read from the memory behind them."""
    root = pair[0]
    tensors = load_file(root / "assistant" / "model.safetensors")
    name = "masked_embedding.token_ordering"
    if name not in tensors:
        pytest.skip("this assistant orders nothing")
    spoiled = tensors[name].clone()
    spoiled[0] = {"twice": int(spoiled[1]), "past the end": tiny.VOCAB, "negative": -1}.get(order, spoiled[0])
    folder = tmp_path / "assistant"
    shutil.copytree(root / "assistant", folder)
    published.save_file(
        tensors | {name: spoiled.float() if order == "floats" else spoiled}, folder / "model.safetensors"
    )
    with pytest.raises(ModelError, match="token_ordering is no permutation of the vocabulary"):
        load_target(root / "target", assistant=folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_centroids": "x"}, "config.json has num_centroids = 'x'; it must be a whole number"),
        ({"backbone_hidden_size": []}, "config.json has backbone_hidden_size = \\[\\]; it must be a whole number"),
        ({"text_config": "x"}, "config.json has text_config = 'x'; it must be an object"),
        ({"text_config": None}, "config.json has text_config = None; it must be an object"),
        ({"text_config.sliding_window": "x"}, "config.json has sliding_window = 'x'; it must be a whole number"),
        (
            {"text_config.num_hidden_layers": 10**9},
            "config.json has num_hidden_layers = 1000000000, but the files hold",
        ),
        ({"text_config.layer_types": "x"}, "config.json does not describe an assistant"),
        ({"text_config.rope_parameters": {"full_attention": 3}}, "config.json does not describe an assistant"),
    ],
)
def test_an_assistants_config_of_the_wrong_types(pair, tmp_path, changes, said):
    root = pair[0]
    folder = tmp_path / "assistant"
    shutil.copytree(root / "assistant", folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        *outer, last = key.split(".")
        (config[outer[0]] if outer else config)[last] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said) as caught:
        load_target(root / "target", assistant=folder)
    assert str(folder) in str(caught.value)


def test_families_without_a_trunk_say_so(tmp_path, checkpoints):
    config = json.loads((checkpoints("llama") / "config.json").read_text()) | {"model_type": "deepseek_v4"}
    folder = tmp_path / "v4"
    tiny.write(folder, config, dict(mx.load(str(checkpoints("llama") / "model.safetensors"))))
    with pytest.raises(ModelError, match="no trunk for deepseek_v4"):
        load_target(folder)
    assert "no trunk for deepseek_v4" in inspect_checkpoint(folder)["arms"]["baseline"]


def test_pairs_that_do_not_fit(pair, tmp_path, checkpoints):
    root = pair[0]
    with pytest.raises(ModelError, match="reads a Gemma 4 target"):
        load_target(checkpoints("llama"), assistant=root / "assistant")
    with pytest.raises(ModelError, match="is no Gemma 4 assistant"):
        load_target(root / "target", assistant=root / "target")
    config = json.loads((root / "assistant" / "config.json").read_text())
    tensors = load_file(root / "assistant" / "model.safetensors")
    for change, words in (
        ({"backbone_hidden_size": 64}, "for a target of width 64"),
        ({"text_config": config["text_config"] | {"hidden_size": 16}}, "does not fit"),
    ):
        folder = tmp_path / words[:5]
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | change))
        published.save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ModelError, match=words):
            load_target(root / "target", assistant=folder)
    with pytest.raises(RequestError, match="nothing that is to run needs one"):
        load_target(root / "target", head="none", assistant=root / "assistant")


def test_a_record_says_nothing_of_rows_that_an_assistant_does_not_keep(loaded):
    request = Session(loaded, parse_arm("depth1")).request(
        tiny.prompt(1, 9), request=0, settings=Settings(max_tokens=4)
    )
    kept = {k: request.settings[k] for k in ("drafter", "history", "prime", "drafts")}  # greedy: no draft is drawn
    assert kept == {"drafter": "mtp", "history": None, "prime": None, "drafts": None}
