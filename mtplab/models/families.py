"""The table of MTP head families: one row each, read by `headspec.find_spec`."""

from __future__ import annotations

from dataclasses import replace

from mtplab.models.headspec import PREFIXES, HeadSpec

# MiMo: concat(hidden, embedding) and a layer of plain attention; recursion on the normed output (two witnesses).
MIMO = HeadSpec(
    family="mimo",
    model_types=("mimo",),
    prefixes=("model.",),
    marks=("mtp_layers.",),
    embed_norm="{p}mtp_layers.{i}.token_layernorm",
    hidden_norm="{p}mtp_layers.{i}.hidden_layernorm",
    proj="{p}mtp_layers.{i}.input_proj",
    block="{p}mtp_layers.{i}",
    final_norm="{p}mtp_layers.{i}.final_layernorm",
    fusion="he",
    hidden="post",
    recursion="final",
    block_class="mimo.TransformerBlock",
)

# Qwen: the layer is a full-attention one of the trunk; pre- or post-norm hidden is unsettled between public codes.
QWEN3_5 = HeadSpec(
    family="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text"),
    prefixes=("", "language_model.", "model.", "model.language_model.", "language_model.model."),
    marks=("mtp.",),
    embed_norm="{p}mtp.pre_fc_norm_embedding",
    hidden_norm="{p}mtp.pre_fc_norm_hidden",
    proj="{p}mtp.fc",
    block="{p}mtp.layers.{i}",
    final_norm="{p}mtp.norm",
    fusion="eh",
    hidden="post",
    recursion="final",
    count_keys=("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers"),
    zero_centred=True,
    block_class="qwen3_5.DecoderLayer",
    block_index="full",
)
QWEN3_5_MOE = replace(QWEN3_5, family="qwen3_5_moe", model_types=("qwen3_5_moe", "qwen3_5_moe_text"))
QWEN3_NEXT = replace(
    QWEN3_5, family="qwen3_next", model_types=("qwen3_next",), block_class="qwen3_next.Qwen3NextDecoderLayer"
)

# DeepSeek V3 and its kin: the head's layers go on counting from the trunk's; the block's output feeds the next depth.
DEEPSEEK_V3 = HeadSpec(
    family="deepseek_v3",
    model_types=("deepseek_v3",),
    prefixes=PREFIXES,
    marks=(),
    embed_norm="{p}layers.{n}.enorm",
    hidden_norm="{p}layers.{n}.hnorm",
    proj="{p}layers.{n}.eh_proj",
    block="{p}layers.{n}",
    final_norm="{p}layers.{n}.shared_head.norm",
    unembed="{p}layers.{n}.shared_head.head",
    embed="{p}layers.{n}.embed_tokens",
    fusion="eh",
    hidden="post",
    recursion="block",
    block_class="deepseek_v3.DeepseekV3DecoderLayer",
    block_index="next",
)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    family="deepseek_v32",
    model_types=("deepseek_v32",),
    block_class="deepseek_v32.DeepseekV32DecoderLayer",
)
# GLM with DeepSeek's sparse attention: the normed output feeds the next depth (public codes differ: an option).
GLM_MOE_DSA = replace(DEEPSEEK_V32, family="glm_moe_dsa", model_types=("glm_moe_dsa",), recursion="final")
GLM4_MOE = replace(DEEPSEEK_V3, family="glm4_moe", model_types=("glm4_moe",), block_class="glm4_moe.DecoderLayer")
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    family="glm4_moe_lite",
    model_types=("glm4_moe_lite",),
    block_class="glm4_moe_lite.Glm4MoeLiteDecoderLayer",
)

# Step-3.5: three layers, each with an unembedding of its own; declared on the hidden state before the final norm.
STEP3P5 = replace(
    DEEPSEEK_V3,
    family="step3p5",
    model_types=("step3p5",),
    final_norm="{p}layers.{n}.transformer.shared_head.norm",
    unembed="{p}layers.{n}.transformer.shared_head.output",
    hidden="pre",
    zero_centred=True,
    block_class="step3p5.Step3p5DecoderLayer",
)

# Nemotron-H: a head layer is a chain of blocks, the fusion in front of the first, the norm behind the last.
NEMOTRON_H = HeadSpec(
    family="nemotron_h",
    model_types=("nemotron_h",),
    prefixes=("", "backbone.", "model.", "language_model."),
    marks=("mtp.",),
    embed_norm="{p}mtp.layers.{first}.enorm",
    hidden_norm="{p}mtp.layers.{first}.hnorm",
    proj="{p}mtp.layers.{first}.eh_proj",
    block="{p}mtp.layers.{b}",
    final_norm="{p}mtp.layers.{last}.final_layernorm",
    fusion="eh",
    hidden="post",
    recursion="final",
    pattern="*E",
    block_class="nemotron_h.NemotronHBlock",
)

# Qwen3.8-Flash-Next: four streams of hidden states (hyper-connections), which the head takes before they are mixed into
# one, norms as a whole, and gives on as they are; each stream gets the projected embedding (two witnesses). Its norms
# add one to their weights themselves, raw or converted. Its last norm is a mixer of the streams.
QWEN4_EXP = HeadSpec(
    family="qwen4_exp",
    model_types=("qwen4_exp",),
    prefixes=("", "language_model.", "model."),
    marks=("mtp.",),
    embed_norm="{p}mtp.pre_fc_norm_embedding",
    hidden_norm="{p}mtp.pre_fc_norm_hidden",
    proj="{p}mtp.fc_hidden",
    embed_proj="{p}mtp.fc_embedding",
    block="{p}mtp.layers.{i}",
    final_norm="{p}mtp.hyper_connection_mixer",
    fusion="sum",
    streams="hc_count",
    hidden="pre",
    recursion="block",
    count_keys=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    block_class="mtplab.models.vlm.head_block",
)

SPECS: tuple[HeadSpec, ...] = (
    MIMO, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, DEEPSEEK_V3, DEEPSEEK_V32, GLM_MOE_DSA, GLM4_MOE, GLM4_MOE_LITE, STEP3P5,
    NEMOTRON_H, QWEN4_EXP,
)  # fmt: skip

# Families whose trunk is taken from mlx-vlm, the optional provider (`vlm`), by the name people know them under.
VLM = {"qwen4_exp": "Qwen3.8-Flash-Next"}

# Known families without a row, and why. The first have no trunk in mlx-lm either.
NO_TRUNK = {
    "deepseek_v4": "mlx-lm has no trunk for deepseek_v4, and mtplab takes trunks from mlx-lm only",
    "gemma4_assistant": "this is the assistant of a Gemma 4 target; give it with --assistant beside the target",
    "gemma4_unified_assistant": "this is the assistant of a Gemma 4 target; give it with --assistant beside the target",
}
GEMMA = "Gemma 4 drafts with an assistant, which is a checkpoint of its own; give it with --assistant"
NO_HEAD = NO_TRUNK | {
    "deepseek_v41": "deepseek_v41 drafts whole blocks (dspark), which is no chain head and not supported",
    "gemma4": GEMMA,
    "gemma4_text": GEMMA,
    "gemma4_unified": GEMMA,
}
