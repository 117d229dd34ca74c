"""The cases of the fault zoo: each with the verdict that is right, and the layer or module that must be named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import block_faults as b
import faults as f
from block_faults import TIES

from mtplab.diagnose.candidates import Candidate, Parts
from mtplab.models.loader import Loaded

SCRIPTED = Candidate("scripted3", "scripted", 3)
DEPTH0 = Candidate("depth0", "none", 0)
HEAD = Candidate("depth2", "mtp", 2)
DEEP = Candidate("depth8", "mtp", 8)
PACKED = {bits: {"load": {"kv_bits": bits, "kv_group_size": 32}, "build": {"head_dim": 32}} for bits in (2, 4, 8)}


@dataclass(frozen=True)
class Case:
    """One fault. `where`: pattern of the layer or module that must be named; None where there is none to name."""

    name: str
    kind: str
    verdict: str
    where: str | None = None
    tamper: Callable[[Parts], Parts] | None = None
    model: Callable[[Loaded], AbstractContextManager[Any]] | None = None
    arms: tuple[Candidate, ...] = (DEPTH0, SCRIPTED)
    tokens: int = 48
    prompt: int = 24
    seed: int = 3  # of the prompt
    eos: int | None = None  # the baseline's token at this position ends the text
    pairs: float | None = None  # rows of the unembedding come in pairs this much apart: near-ties
    spec: str | None = None  # simulated numerics
    load: dict[str, Any] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)


L = f.rows_left
late = lambda cache, n, rows, rejects: cache.length > 24 + 200  # noqa: E731
wrapped = lambda cache, n, rows, rejects: cache.length > 24 + 60  # noqa: E731
second = lambda cache, n, rows, rejects: rejects >= 2  # noqa: E731


def full_drops_one(cache: Any, attempt: Any, n: int, keep: Callable[[int], None]) -> None:
    """Only a fully accepted block loses its last row, in layer 1."""
    keep(n)
    if n == attempt.rows:
        cache.layers[1].offset -= 1


LOGIC = [
    Case("roll-back skipped", "llama", "logic", "*.layers.0", f.on_keep(L(9))),
    Case("roll-back off by one", "llama", "logic", "*.layers.0", f.on_keep(L(1))),
    Case("roll-back off by two", "mimo", "logic", "*.layers.0", f.on_keep(L(2))),
    Case("one row too few", "llama", "logic", "*.layers.0", f.on_keep(L(-1))),
    Case("roll-back skipped in layer 1", "llama", "logic", "*.layers.1", f.on_keep(L(9, layers=(1,)))),
    Case("off by one in layer 2", "mimo", "logic", "*.layers.2", f.on_keep(L(1, layers=(2,)))),
    Case("attention layer of a hybrid", "qwen3_5", "logic", "*.layers.3", f.on_keep(L(1))),
    Case("quantized KV off by one", "llama", "logic", "*.layers.0", f.on_keep(L(1)), **PACKED[8]),
    Case("old row overwritten in layer 1", "mimo", "logic", "*.layers.1", f.on_keep(f.old_row_overwritten(1))),
    Case("only after token 200", "llama", "logic", "*.layers.0", f.on_keep(L(1, when=late)), tokens=256),
    Case("only after 60 tokens", "gemma3_text", "logic", "*.layers.1", f.on_keep(L(1, when=wrapped)), tokens=96),
    Case("only on the second reject", "llama", "logic", "*.layers.0", f.on_keep(L(1, when=second))),
    Case("only on full acceptance", "llama", "logic", "*.layers.1", f.on_keep(full_drops_one)),
    Case("ring trimmed in silence", "gemma3_text", "logic", "*.layers.0", f.on_keep(f.ring_silent)),
    Case("ring silent, not full at first", "gemma3_text", "logic", "*.layers.0", f.on_keep(f.ring_silent), prompt=6),
    Case("ring counted back only", "gemma3_text", "logic", "*.layers.0", f.on_keep(f.ring_counted_only)),
    Case("gated-delta state stale", "qwen3_5", "logic", "*.layers.0", f.on_keep(f.recurrent(f.stale))),
    Case("gated-delta not rolled back", "qwen3_5", "logic", "*.layers.0", f.on_keep(f.recurrent(f.not_rolled_back))),
    Case("state stale in layer 2", "qwen3_5", "logic", "*.layers.2", f.on_keep(f.recurrent(f.stale, layers=(2,)))),
    Case("conv window shifted", "qwen3_5", "logic", "*.layers.0", f.on_keep(f.recurrent(f.conv_shifted))),
    Case("EOS cut leaves the cache ahead", "llama", "logic", None, f.eos_ahead, eos=6),
    Case("head cache not trimmed", "mimo", "logic", None, f.drafter_with(_trim=f.no_trim), arms=(DEPTH0, HEAD)),
    Case("head cache of a hybrid not trimmed", "qwen3_5", "logic", None, f.drafter_with(_trim=f.no_trim), arms=(HEAD,)),
    Case("head gets wrong hidden rows", "mimo", "logic", None, f.drafter_with(observe=f.hidden_shifted), arms=(HEAD,)),
    Case("head primed one token off", "mimo", "logic", None, f.drafter_with(prime=f.prime_shifted), arms=(HEAD,)),
    Case("head of two caches not trimmed", "deepseek_v32", "logic", None, f.drafter_with(_trim=f.no_trim),
         arms=(DEPTH0, HEAD)),
    Case("head trims its attention only", "deepseek_v32", "logic", None, f.drafter_with(_trim=f.trim_first_only),
         arms=(HEAD,)),
    Case("head of two caches primed one token off", "deepseek_v32", "logic", None,
         f.drafter_with(prime=f.prime_shifted), arms=(HEAD,)),
    Case("head primed twice", "qwen3_5", "logic", None, f.drafter_with(prime=f.prime_twice), arms=(HEAD,)),
    Case("penalty keeps rejected tokens", "llama", "logic", None, f.penalty_keeps_rejected),
    Case("last prompt token prefetched twice", "llama", "logic", None, f.last_prompt_token_twice),
    Case("a step fed twice", "mimo", "logic", None, f.step_twice(30)),
    Case("correction read from row 0", "llama", "logic", None, model=f.judged(f.first_row_read)),
    Case("ties to the highest id", "llama", "logic", None, model=f.judged(f.highest_id), pairs=0.0),
    Case("choice from bfloat16 logits", "llama", "logic", None, model=f.judged(f.low_precision_choice), pairs=1e-4),
    Case("one draft too many accepted", "qwen3_5", "logic", None, model=f.judged(f.one_too_many)),
    Case("a right draft thrown away", "mimo", "logic", None, model=f.judged(f.one_too_few)),
    Case("rejected draft fed on", "llama", "logic", None, model=f.feeds_rejected),
    Case("gate rows shifted", "qwen3_5", "logic", "*.layers.0.linear_attn.in_proj_a",
         model=b.rows_rolled("language_model.model.layers.0.linear_attn.in_proj_a")),
    Case("gate rows shifted in layer 2", "qwen3_5", "logic", "*.layers.2.linear_attn.in_proj_b",
         model=b.rows_rolled("language_model.model.layers.2.linear_attn.in_proj_b")),
    Case("value rows shifted", "llama", "logic", "*.layers.1.self_attn.v_proj",
         model=b.rows_rolled("model.layers.1.self_attn.v_proj")),
    Case("router rows shifted", "qwen3_moe", "logic", "*.layers.1.mlp.gate",
         model=b.rows_rolled("model.layers.1.mlp.gate")),
    Case("router's choice shifted", "deepseek_moe", "logic", "*.layers.1.mlp.gate",
         model=b.rows_rolled("model.layers.1.mlp.gate")),
    Case("window one key too narrow", "gemma3_text", "logic", "*.layers.0.self_attn", model=b.window_narrow),
    Case("rows of a block see ahead", "llama", "logic", "*.layers.0.self_attn", model=b.sees_ahead),
    Case("stops one token early", "llama", "length", None, f.cap_short),
    Case("EOS unseen inside a block", "llama", "length", None, f.eos_missed, eos=6),
]  # fmt: skip


def positions() -> list[Case]:
    """Cases that need a state of their own each time they run."""
    fault = b.PositionAfterReject()
    return [Case("wrong position after a reject", "llama", "logic", "*.layers.0", fault.tamper, fault.model)]


def simulated(name: str, kind: str, spec: str, where: str, **more: Any) -> Case:
    return Case(name, kind, "numeric", where, spec=spec, **{"pairs": TIES, "tokens": 64} | more)


Q = "*.layers.0.self_attn.?_proj"
WIDE = {"build": {"sliding_window": 128}}  # a window that is never full: the only cause is the simulated one
LINEAR = "*.layers.0.linear_attn.in_proj_*"
AS_IS = {"pairs": None, "tokens": 48}  # no ties made: texts that leave by themselves
NUMERIC = [
    simulated("split-K everywhere", "llama", "splitk@*", Q),
    simulated("split-K in layer 1", "mimo", "splitk@layers.1.*", "*.layers.1.self_attn.?_proj"),
    simulated("split-K of an unembedding", "llama", "splitk@lm_head", "lm_head"),
    simulated("split-K of a tied unembedding", "mimo", "splitk@lm_head", "embed_tokens"),
    simulated("split-K in a hybrid", "qwen3_5", "splitk@layers.0.*", "*.layers.0.linear_attn.in_proj_*"),
    simulated("split-K, layers 1 and 2", "llama", "splitk@layers.1.mlp.*,splitk@layers.2.mlp.*", "*.layers.1.mlp.*"),
    simulated("bf16 sums in attention", "llama", "bf16acc:8@self_attn.*", Q),
    simulated("bf16 sums in one MLP", "mimo", "bf16acc:8@layers.2.mlp.*", "*.layers.2.mlp.*"),
    simulated("bf16 sums of an unembedding", "llama", "bf16acc:8@lm_head", "lm_head"),
    simulated("low precision everywhere", "llama", "lowp@*", Q),
    simulated("low precision in a window model", "gemma3_text", "lowp@layers.1.*", "*.layers.1.self_attn.?_proj",
              **WIDE),
    simulated("low precision in a hybrid", "qwen3_5", "lowp@mlp.*", "*.layers.0.mlp.*"),
    simulated("noise 1e-7", "llama", "noise:1e-7@layers.0.*", Q),
    simulated("noise 1e-6", "mimo", "noise:1e-6@layers.1.mlp.*", "*.layers.1.mlp.*"),
    simulated("noise 1e-5", "llama", "noise:1e-5@self_attn.*", Q),
    simulated("noise 1e-4", "qwen3_5", "noise:1e-4@layers.2.*", "*.layers.2.linear_attn.in_proj_*"),
    simulated("noise 1e-3", "mimo", "noise:1e-3@*", Q),
    simulated("noise 1e-2", "llama", "noise:1e-2@layers.1.*", "*.layers.1.self_attn.?_proj"),
    simulated("noise 1e-2 everywhere", "mimo", "noise:1e-2@*", Q),
    simulated("noise 1e-2 of an unembedding", "llama", "noise:1e-2@lm_head", "lm_head"),
    simulated("noise 1e-3 in a window model", "gemma3_text", "noise:1e-3@layers.0.mlp.*", "*.layers.0.mlp.*", **WIDE),
    simulated("router near-ties, another order", "qwen3_moe", "noise:1e-6@self_attn.*", Q, model=b.routers_tied),
    simulated("router near-ties, other experts", "qwen3_moe", "noise:1e-6@self_attn.*", Q, model=b.routers_tied,
              build={"num_experts_per_tok": 3}),
    simulated("4-bit KV, bf16 sums", "llama", "bf16acc:8@*", Q, **AS_IS, **PACKED[4], seed=5),
    simulated("2-bit KV, low precision", "llama", "lowp@*", Q, **AS_IS, **PACKED[2]),
    simulated("a norm over little, bf16 sums", "qwen3_5", "bf16acc:8@*", LINEAR, **AS_IS, arms=(HEAD,), seed=8),
    simulated("a norm over little, low precision", "qwen3_5", "lowp@*", LINEAR, **AS_IS, arms=(DEEP,), seed=9),
    simulated("a recurrence, bf16 sums", "qwen3_5", "bf16acc:8@*", LINEAR, **AS_IS, arms=(HEAD,), seed=7),
    simulated("a recurrence, noise 1e-2", "qwen3_5", "noise:1e-2@*", LINEAR, **AS_IS, arms=(DEEP,), seed=9),
    simulated("sums that cancel, bf16 sums", "deepseek_v32", "bf16acc:8@*", "*.layers.0.self_attn.q_a_proj", **AS_IS,
              arms=(DEEP,), seed=7),
    Case("MLA attention, float32", "deepseek_v3", "numeric", "*.layers.0.self_attn", pairs=TIES, tokens=64),
    Case("MLA attention, bfloat16", "deepseek_v3", "numeric", "*.layers.0.self_attn", pairs=3e-3, tokens=96,
         load={"dtype": "bfloat16"}),
    Case("sliding window, float32", "gemma3_text", "numeric", "*.layers.0.self_attn", pairs=TIES, tokens=64),
    Case("sliding window, one row after a block", "gemma3_text", "numeric", "*.layers.0.self_attn", pairs=3e-3,
         tokens=96, arms=(Candidate("once", "scripted", None, (1,) + (0,) * 96),), load={"dtype": "bfloat16"}),
    Case("sliding window, bfloat16", "gemma3_text", "numeric", "*.layers.0.self_attn", pairs=3e-3, tokens=96,
         load={"dtype": "bfloat16"}),
]  # fmt: skip


def late_overwrite(layer: int, after: int) -> Callable[[Parts], Parts]:
    """An old row is overwritten, but only once the cache holds more than `after` rows."""
    inner = f.old_row_overwritten(layer)

    def change(cache: Any, attempt: Any, n: int, keep: Callable[[int], None]) -> None:
        inner(cache, attempt, n, keep) if cache.length > after else keep(n)

    return f.on_keep(change)


# A fault in the company of rounding: near-ties are left early and explain nothing of what comes after them.
BEHIND = [
    Case("late fault behind near-ties", "llama", "logic", "*.layers.1", late_overwrite(1, 24 + 80), tokens=128,
         pairs=TIES, spec="noise:1e-4@layers.1.mlp.*"),
    Case("off by one under bf16 sums", "llama", "logic", "*.layers.0", f.on_keep(L(1)), pairs=TIES,
         spec="bf16acc:8@self_attn.*"),
    Case("gated-delta state stale under noise", "qwen3_5", "logic", "*.layers.0", f.on_keep(f.recurrent(f.stale)),
         spec="noise:1e-2@*"),
    Case("conv window shifted under noise", "qwen3_5", "logic", "*.layers.0", f.on_keep(f.recurrent(f.conv_shifted)),
         spec="noise:1e-2@*"),
    Case("old row overwritten, MLA in bfloat16", "deepseek_v3", "logic", "*.layers.1",
         f.on_keep(f.old_row_overwritten(1)), pairs=3e-3, load={"dtype": "bfloat16"}),
    Case("value rows shifted, 4-bit KV, low precision", "llama", "logic", "*.layers.1.self_attn.v_proj",
         model=b.rows_rolled("model.layers.1.self_attn.v_proj"), spec="lowp@*", **PACKED[4]),
    Case("4-bit KV holds the rows of a block shifted", "llama", "logic", "*.layers.0.cache.*", model=b.cached_rolled,
         spec="lowp@*", **PACKED[4]),
    Case("gate rows shifted under noise 1e-2", "qwen3_5", "logic", "*.layers.2.linear_attn.in_proj_a",
         model=b.rows_rolled("language_model.model.layers.2.linear_attn.in_proj_a"), spec="noise:1e-2@*"),
    Case("window one key too narrow under noise 1e-3", "gemma3_text", "logic", "*.layers.0.self_attn",
         model=b.window_narrow, spec="noise:1e-3@*"),
    Case("head gets wrong hidden rows under noise 1e-2", "deepseek_v32", "logic", None,
         f.drafter_with(observe=f.hidden_shifted), arms=(HEAD,), spec="noise:1e-2@layers.2.*"),
    Case("ring trimmed in silence, bfloat16", "gemma3_text", "logic", "*.layers.0", f.on_keep(f.ring_silent),
         pairs=3e-3, load={"dtype": "bfloat16"}),
]  # fmt: skip


def cases() -> list[Case]:
    return [*LOGIC, *positions(), *BEHIND, *NUMERIC]
