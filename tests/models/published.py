"""Tiny checkpoints of real families, made by transformers and written in the layout the families are published in.

transformers is the independent implementation: its trunk gives the logits, its decoder layers the blocks of the
plain reference heads, its `MtpModel` a second reference where it runs. Tensors are renamed here, by hand, to what
public checkpoints call them; nothing of mtplab is used but its tokenizer file.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import families
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

Tensors = dict[str, torch.Tensor]
torch.set_num_threads(1)  # tiny products: threads only wait for each other


@dataclass
class Layer:
    """One head layer in torch: the parts of the facts table."""

    e_norm: Any
    h_norm: Any
    proj: Any
    blocks: list[Any]
    final_norm: Any
    unembed: Any
    hidden_first: bool = False


@dataclass
class Made:
    """A checkpoint folder with the torch models it was written from."""

    family: str
    folder: Path
    main: Any  # ForCausalLM, or Step's text model with an `lm_head`
    layers: list[Layer]
    mtp: Any = None  # transformers' MtpModel over the same tensors
    tensors: Tensors = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def decoder(self) -> Any:
        return getattr(self.main, "model", self.main)

    @torch.no_grad()
    def trunk(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """-> hidden after the final norm [L, D], hidden before it [L, D]; `logits` is the unembedding of the first."""
        before = []
        norm = getattr(self.decoder, "norm", None) or self.decoder.norm_f
        hook = norm.register_forward_pre_hook(lambda _m, args: before.append(args[0]))
        post = self.decoder(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        hook.remove()
        return post, before[-1][0]

    @torch.no_grad()
    def plain(self, i: int, tokens: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Head layer i over rows (hidden[t], token[t+1]) -> block output, normed [m, D], logits [m, V]."""
        layer, m = self.layers[i], len(tokens)
        embed = self.decoder.get_input_embeddings()(torch.tensor([tokens]))
        parts = [layer.e_norm(embed), layer.h_norm(hidden[None])]
        x = layer.proj(torch.cat(parts[::-1] if layer.hidden_first else parts, dim=-1))
        mask = torch.full((m, m), torch.finfo(torch.float32).min).triu(1)[None, None]
        for block in layer.blocks:
            x = self._block(block, x, mask)
        normed = layer.final_norm(x)
        return x[0], normed[0], layer.unembed(normed)[0]

    def _block(self, block: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])[None]
        if getattr(block, "attention_type", "") == "sliding_attention":
            away = torch.ones(mask.shape[-2:]).tril(-self.config["sliding_window"])  # this many rows back and more
            mask = mask.masked_fill(away.bool(), torch.finfo(torch.float32).min)
        arguments = {"attention_mask": mask, "position_ids": positions}
        rotary = getattr(self.decoder, "rotary_emb", None)
        if rotary is not None:
            named = {"layer_type": block.attention_type} if self.family == "step3p5" else {}
            arguments["position_embeddings"] = rotary(x, position_ids=positions, **named)
        out = block(x, **arguments)
        return out[0] if isinstance(out, tuple) else out

    @torch.no_grad()
    def by_mtp_model(self, i: int, tokens: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same rows through transformers' MtpModel -> normed [m, D], logits [m, V]."""
        positions = torch.arange(1, len(tokens) + 1)[None]
        out = self.mtp.forward_layer(i, hidden[None], positions, None, input_ids=torch.tensor([tokens]))
        return out[0], self.main.lm_head(out)[0]


def randomize(module: torch.nn.Module, seed: int) -> None:
    """Norms near one (near zero where the class adds one), logits with a standard deviation of about 3."""
    generator = torch.Generator().manual_seed(seed)
    for owner in module.modules():
        centred = families.zero_centred(owner)
        own = [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
        for name, p in own:
            if not p.is_floating_point() or p.ndim == 0 or "inv_freq" in name:
                continue
            noise = torch.randn(p.shape, generator=generator)
            if "Norm" in type(owner).__name__ or name == "layer_scalar":
                value = (0.0 if centred else 1.0) + 0.1 * noise
            elif name in ("A_log", "dt_bias") or "correction_bias" in name:
                # A correction below zero would let a masked group win in one implementation and not in another.
                value = torch.rand(p.shape, generator=generator)
            elif p.ndim == 1:
                value = 0.1 * noise
            else:
                value = noise * (1.0 if isinstance(owner, torch.nn.Embedding) else 1.5 / p.shape[-1] ** 0.5)
            p.data.copy_(value)


def build(family: str, folder: Path, seed: int = 0) -> Made:
    """Make the family's tiny model with its head and write it as published."""
    config, model_class, head_layers = families.transformers_config(family)
    main = model_class(config).eval()
    if not hasattr(main, "lm_head"):
        main.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    randomize(main, seed)
    main.lm_head.weight.data.mul_(2.0)
    made = Made(family, folder, main, [])
    if family in families.OWN_BLOCKS:
        made.layers = [families.OWN_BLOCKS[family](config, main, i) for i in range(head_layers)]
        for i, layer in enumerate(made.layers):
            for part in (layer.e_norm, layer.h_norm, layer.proj, *layer.blocks, layer.final_norm):
                randomize(part.eval(), seed + 10 + i)
            if layer.unembed is not main.lm_head:
                randomize(layer.unembed, seed + 20 + i)
                layer.unembed.weight.data.mul_(2.0)
    else:
        made.mtp = MtpModel(main, head_layers).eval()
        randomize(made.mtp.layers, seed + 10)
        # Its mask table does not know sparse attention; with few tokens that is causal attention.
        made.mtp.config.layer_types = None
        if family == "glm_moe_dsa":
            layers, made.mtp = made.mtp.layers, None  # its block returns a pair, which MtpLayer does not take
        else:
            layers = made.mtp.layers
        made.layers = [Layer(x.enorm, x.hnorm, x.eh_proj, [x.mtp_block], x.post_norm, main.lm_head) for x in layers]
    made.tensors = trunk_tensors(made, folder)
    for i, layer in enumerate(made.layers):
        made.tensors |= families.head_tensors(made, i, layer)
    made.config = families.published_config(family, json.loads(config.to_json_string()), head_layers)
    write(made, folder)
    return made


def trunk_tensors(made: Made, folder: Path) -> Tensors:
    """As transformers saves them, which undoes what it does on loading; Step and MiMo by hand."""
    if made.family == "step3p5":
        out: Tensors = {}
        for name, a in made.main.state_dict().items():
            out |= families.step_names(name if name.startswith("lm_head") else f"model.{name}", a)
        return out
    # Qwen3.5 MoE is published with fused experts, the others with numbered ones.
    made.main.save_pretrained(folder / "torch", save_original_format=made.family != "qwen3_5_moe")
    return load_file(folder / "torch" / "model.safetensors")


def numbered(name: str, a: torch.Tensor) -> Tensors:
    """Stacked experts one by one: gate_up_proj [E, 2I, D] holds gate first."""
    if name.endswith("experts.gate_up_proj"):
        parts = {"gate_proj": a[:, : a.shape[1] // 2], "up_proj": a[:, a.shape[1] // 2 :]}
    elif name.endswith(("experts.down_proj", "experts.up_proj")):
        parts = {name.rsplit(".", 1)[1]: a}
    else:
        return {name: a}
    stem = name.rsplit(".", 1)[0]
    return {f"{stem}.{e}.{p}.weight": x[e] for p, x in parts.items() for e in range(x.shape[0])}


def write(made: Made, folder: Path, tensors: Tensors | None = None, **changes: Any) -> Path:
    """The folder with other tensors or config entries (None takes an entry away)."""
    import tiny

    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in (copy.deepcopy(made.config) | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tiny.byte_tokenizer()))
    save_file({k: a.contiguous() for k, a in (tensors or made.tensors).items()}, folder / "model.safetensors")
    return folder


__all__ = ["Made", "build", "transformers", "write"]
