"""A tiny Qwen3.8-Flash-Next in its published layout: transformers' trunk, a head out of transformers' modules under the
published names, the n-gram table in shards, and a vision tensor that a text target must leave alone."""

from __future__ import annotations

import copy
from pathlib import Path

import published
import tiny
import torch
import transformers
from transformers.models.qwen4_exp import modeling_qwen4_exp as m

STREAMS, DIM, EOS = 4, 32, 5
TEXT = {
    "vocab_size": tiny.VOCAB, "hidden_size": DIM, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "eos_token_id": EOS, "bos_token_id": None, "pad_token_id": None,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "hc_count": STREAMS, "hc_lowrank": 8, "output_gate_type": "sigmoid",
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "ple_layer_ids": [2], "ple_embed_dim": 32, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4, "seed": 1234,
    "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_compress_ratio": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip


class TorchHead(torch.nn.Module):
    """The MTP head out of transformers' modules, under the published names."""

    def __init__(self, config: transformers.Qwen4ExpTextConfig):
        super().__init__()
        norm = lambda dims: m.Qwen4ExpTextRMSNorm(dims, eps=config.rms_norm_eps)  # noqa: E731
        linear = lambda: torch.nn.Linear(DIM, DIM, bias=False)  # noqa: E731
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(DIM), norm(STREAMS * DIM)
        self.fc_embedding, self.fc_hidden = linear(), linear()
        own = copy.deepcopy(config)
        own.layer_types, own.ple_layer_ids = ["indexed_attention"], []
        self.layers = torch.nn.ModuleList([m.Qwen4ExpTextDecoderLayer(own, 0)])
        self.hyper_connection_mixer = m.Qwen4ExpTextGatedResidual(config, use_combine=False)

    @torch.no_grad()
    def forward(self, main: torch.nn.Module, tokens: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows (hidden[t], token[t+1]); hidden [n, S D] -> (the next depth's hidden [n, S D], logits [n, V])."""
        e = self.fc_embedding(self.pre_fc_norm_embedding(main.model.embed_tokens(torch.tensor([tokens]))))
        h = self.pre_fc_norm_hidden(hidden[None]).unflatten(-1, (STREAMS, DIM))
        x = (self.fc_hidden(h) + e[..., None, :]).flatten(-2)
        n = len(tokens)
        mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
        positions = torch.arange(n)[None, None].expand(3, 1, n)
        x = self.layers[0](x, main.model.rotary_emb(x, positions), attention_mask=mask)
        return x[0], main.lm_head(self.hyper_connection_mixer(x))[0]


def build(folder: Path, budget: int = 512, **changes: object) -> published.Made:
    """`budget`: keys that a row of attention may look at, in blocks of four; below the context it chooses."""
    settings = TEXT | {"indexer_budget": budget} | changes
    config = transformers.Qwen4ExpTextConfig(**settings)
    config._attn_implementation = "eager"
    main = transformers.Qwen4ExpForCausalLM(config).eval()
    published.randomize(main, 0)
    main.lm_head.weight.data.mul_(4.0)
    head = TorchHead(config).eval()
    published.randomize(head, 1)
    made = published.Made("qwen4_exp", folder, main, [], mtp=head)
    for name, a in main.state_dict().items():
        if name.endswith("ngram_embedding.weight"):
            parts = torch.tensor_split(a, settings["split_ngram_parts"])
            stem = name.removesuffix("weight")
            shards = {f"{stem}shard_{i}.weight": part.clone() for i, part in enumerate(parts)}
        else:
            shards = {name: a}
        for one, value in shards.items():
            made.tensors[one.replace("model.", "model.language_model.", 1)] = value
    made.tensors |= {f"mtp.{name}": a for name, a in head.state_dict().items()}
    made.tensors["model.visual.patch_embed.proj.bias"] = torch.zeros(3)
    text = settings | {"model_type": "qwen4_exp_text", "mtp_num_hidden_layers": 1}
    made.config = {"model_type": "qwen4_exp", "text_config": {k: v for k, v in text.items() if v is not None}}
    made.config |= {"vision_config": {"model_type": "qwen4_exp", "depth": 1}, "tie_word_embeddings": False}
    published.write(made, folder)
    return made
