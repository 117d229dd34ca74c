"""The first weights of `lab-canvas`: eight of lab-mtp's ten trunk layers, carried over as far as the format allows.

    python graft.py --work DIR --model ../../mtplab/data/lab-mtp      # writes DIR/graft.pt

The two formats differ where magnitudes are concerned: DiffusionGemma normalizes queries, keys and values by head and
every sub-layer's output. So directions are kept, and each norm's weight is the mean magnitude that lab-mtp has there,
measured on training text. SiLU is a GELU of 1/1.702 of its argument, nearly. The embedding is scaled to the decoder's
unit input. What has no counterpart begins small or at random: experts, self-conditioning, the full layer's values.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from twin import FULL, Config, LabCanvas

OTHER = Path(__file__).resolve().parent.parent / "000_lab_mtp"
SILU = 1.702  # gelu(x) is about x * sigmoid(1.702 x)
KEPT = (0, 1, 3, 5, 6, 7, 8, 9)  # of lab-mtp's layers: those whose absence costs most (see README.md)


def trunk(folder: Path):
    """lab-mtp in torch."""
    from safetensors.torch import load_file

    spec = importlib.util.spec_from_file_location("model_lab_mtp", OTHER / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    model = module.LabMTP(module.Config())
    model.load_state_dict({k: v.float() for k, v in load_file(str(folder / "model.safetensors")).items()})
    return model.eval()


def rms(x: torch.Tensor, dims: tuple[int, ...] = ()) -> torch.Tensor:
    """Root mean square over the last axis, then its mean over all others but `dims`."""
    size = x.pow(2).mean(-1).sqrt()
    return size.mean([i for i in range(size.ndim) if i not in dims])


@torch.no_grad()
def magnitudes(model, ids: torch.Tensor, kept: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    """Per kept layer: mean magnitudes of queries, keys, values (by kv head) and both outputs."""
    out, x, c = [], model.model.embed_tokens(ids), model.c
    for i in kept:
        layer = model.model.layers[i]
        h = layer.input_layernorm(x)
        split = [p(h).view(*ids.shape, -1, c.dim // c.heads) for p in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
        v = layer.self_attn.v_proj(h).view(*ids.shape, c.kv_heads, -1)
        y = layer.self_attn(h)
        x = x + y
        z = layer.mlp(layer.post_attention_layernorm(x))
        x = x + z
        out.append({"q": rms(split[0]), "k": rms(split[1]), "v": rms(v, (2,)), "attn": rms(y), "mlp": rms(z)})
    return out


@torch.no_grad()
def graft(model, target: LabCanvas, ids: torch.Tensor, kept: tuple[int, ...] = KEPT) -> None:
    c, decoder = target.c, target.model["decoder"]
    unit = rms(model.model.embed_tokens.weight) * c.dim**0.5
    decoder.embed_tokens.weight.copy_(model.model.embed_tokens.weight / unit)
    decoder.norm.weight.copy_(model.model.norm.weight * unit)
    stream = c.dim**0.5 / unit  # our residual stream over lab-mtp's
    for i, layer, size in zip(kept, decoder.layers, magnitudes(model, ids, kept), strict=True):
        source, attn, quiet = model.model.layers[i], layer.self_attn, layer.self_attn.kind == FULL
        layer.input_layernorm.weight.copy_(source.input_layernorm.weight)
        layer.pre_feedforward_layernorm.weight.copy_(source.post_attention_layernorm.weight)
        layer.pre_feedforward_layernorm_2.weight.copy_(source.post_attention_layernorm.weight)
        for name in ("q_proj", "k_proj") if quiet else ("q_proj", "k_proj", "v_proj"):
            ours, theirs = getattr(attn, name), getattr(source.self_attn, name)
            ours.weight.copy_(theirs.weight)
            ours.bias.copy_(theirs.bias)
        attn.q_norm.weight.fill_(size["q"] * attn.size**-0.25)
        attn.k_norm.weight.fill_(size["k"] * attn.size**-0.25)
        by_head = size["v"].repeat_interleave(c.heads // c.kv_heads).repeat_interleave(attn.size)
        attn.o_proj.weight.copy_(source.self_attn.o_proj.weight * by_head)
        layer.post_attention_layernorm.weight.fill_(size["attn"] * stream * (0.2 if quiet else 1.0))
        layer.mlp.gate_proj.weight.copy_(source.mlp.gate_proj.weight / SILU)
        layer.mlp.up_proj.weight.copy_(source.mlp.up_proj.weight * SILU)
        layer.mlp.down_proj.weight.copy_(source.mlp.down_proj.weight)
        layer.post_feedforward_layernorm.weight.fill_(size["mlp"] * stream)
        layer.post_feedforward_layernorm_2.weight.fill_(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()
    from train import LENGTH, first

    torch.manual_seed(1)
    target, ids = LabCanvas(Config()), first.Batches(args.work, "train", 5).draw(4, LENGTH)
    graft(trunk(args.model), target, ids)
    torch.save(target.state_dict(), args.work / "graft.pt")


if __name__ == "__main__":
    main()
