# Emitted by moec; do not edit. Regenerate: moec compile qwen3.5-397b-a17b --target tpu7x:2x2x1 --workload decode_512x9216
# Digests: spec a912a5398831487d, target 8c7a408c9f47814c, workload 919da80e67124d21, overrides 4f53cda18c2baa0c, plan 63824eb498475da7
"""Weights of qwen3.5-397b-a17b as the program holds them, and where a checkpoint keeps them.

`sources` are alternatives: the loader takes the first whose tensors are all there. {layer} and
{expert} stand for indices; ops turn the stored tensor into the program's (see blocks/core/array_info.py).
"""

from moec.blocks.core.array_info import ArrayInfo, Source

IGNORE = (  # stored tensors this program does not use
    "mtp.*",
    "model.visual.*",
)
SCALE_SUFFIX = "_scale_inv"  # block scales of NAME are stored as NAME + suffix
SCALE_BLOCK = (128, 128)  # rows x columns under one scale


def gdn_weights(layers):
    """gdn weights of the given layers."""
    return {
        "w_q": ArrayInfo(
            (len(layers), 4096, 2048), "bfloat16", (None, None, "qk_heads"),
            sources=(
                Source("model.language_model.layers.{layer}.linear_attn.in_proj_qkv.weight", (("slice", -2, 0, 2048), ("transpose",))),
                Source("model.layers.{layer}.linear_attn.in_proj_qkv.weight", (("slice", -2, 0, 2048), ("transpose",))),
            ),
            layers=layers,
        ),
        "w_k": ArrayInfo(
            (len(layers), 4096, 2048), "bfloat16", (None, None, "qk_heads"),
            sources=(
                Source("model.language_model.layers.{layer}.linear_attn.in_proj_qkv.weight", (("slice", -2, 2048, 4096), ("transpose",))),
                Source("model.layers.{layer}.linear_attn.in_proj_qkv.weight", (("slice", -2, 2048, 4096), ("transpose",))),
            ),
            layers=layers,
        ),
        "w_v": ArrayInfo(
            (len(layers), 4096, 8192), "bfloat16", (None, None, "v_heads"),
            sources=(
                Source("model.language_model.layers.{layer}.linear_attn.in_proj_qkv.weight", (("slice", -2, 4096, 12288), ("transpose",))),
                Source("model.layers.{layer}.linear_attn.in_proj_qkv.weight", (("slice", -2, 4096, 12288), ("transpose",))),
            ),
            layers=layers,
        ),
        "w_z": ArrayInfo(
            (len(layers), 4096, 8192), "bfloat16", (None, None, "v_heads"),
            sources=(
                Source("model.language_model.layers.{layer}.linear_attn.in_proj_z.weight", (("transpose",),)),
                Source("model.layers.{layer}.linear_attn.in_proj_z.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
        "w_b": ArrayInfo(
            (len(layers), 4096, 64), "bfloat16", (None, None, "v_heads"),
            sources=(
                Source("model.language_model.layers.{layer}.linear_attn.in_proj_b.weight", (("transpose",),)),
                Source("model.layers.{layer}.linear_attn.in_proj_b.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
        "w_a": ArrayInfo(
            (len(layers), 4096, 64), "bfloat16", (None, None, "v_heads"),
            sources=(
                Source("model.language_model.layers.{layer}.linear_attn.in_proj_a.weight", (("transpose",),)),
                Source("model.layers.{layer}.linear_attn.in_proj_a.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
        "conv_q": ArrayInfo(
            (len(layers), 2048, 4), "bfloat16", (None, "qk_heads", None),
            sources=(
                Source("model.language_model.layers.{layer}.linear_attn.conv1d.weight", (("slice", -2, 0, 2048),)),
                Source("model.layers.{layer}.linear_attn.conv1d.weight", (("slice", -2, 0, 2048),)),
            ),
            layers=layers,
        ),
        "conv_k": ArrayInfo(
            (len(layers), 2048, 4), "bfloat16", (None, "qk_heads", None),
            sources=(
                Source("model.language_model.layers.{layer}.linear_attn.conv1d.weight", (("slice", -2, 2048, 4096),)),
                Source("model.layers.{layer}.linear_attn.conv1d.weight", (("slice", -2, 2048, 4096),)),
            ),
            layers=layers,
        ),
        "conv_v": ArrayInfo(
            (len(layers), 8192, 4), "bfloat16", (None, "v_heads", None),
            sources=(
                Source("model.language_model.layers.{layer}.linear_attn.conv1d.weight", (("slice", -2, 4096, 12288),)),
                Source("model.layers.{layer}.linear_attn.conv1d.weight", (("slice", -2, 4096, 12288),)),
            ),
            layers=layers,
        ),
        "a_log": ArrayInfo(
            (len(layers), 64), "float32", (None, "v_heads"),
            sources=(
                Source("model.language_model.layers.{layer}.linear_attn.A_log"),
                Source("model.layers.{layer}.linear_attn.A_log"),
            ),
            layers=layers,
            init="log_decay",
        ),
        "dt_bias": ArrayInfo(
            (len(layers), 64), "float32", (None, "v_heads"),
            sources=(
                Source("model.language_model.layers.{layer}.linear_attn.dt_bias"),
                Source("model.layers.{layer}.linear_attn.dt_bias"),
            ),
            layers=layers,
        ),
        "out_norm": ArrayInfo(
            (len(layers), 128), "bfloat16", (None, None),
            sources=(
                Source("model.language_model.layers.{layer}.linear_attn.norm.weight"),
                Source("model.layers.{layer}.linear_attn.norm.weight"),
            ),
            layers=layers,
            init="gain",
        ),
        "w_o": ArrayInfo(
            (len(layers), 8192, 4096), "bfloat16", (None, "v_heads", None),
            sources=(
                Source("model.language_model.layers.{layer}.linear_attn.out_proj.weight", (("transpose",),)),
                Source("model.layers.{layer}.linear_attn.out_proj.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
    }


def moe_weights(layers):
    """moe weights of the given layers."""
    return {
        "router": ArrayInfo(
            (len(layers), 4096, 512), "bfloat16", (None, None, None),
            sources=(
                Source("model.language_model.layers.{layer}.mlp.gate.weight", (("transpose",),)),
                Source("model.layers.{layer}.mlp.gate.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
        "shared_gate": ArrayInfo(
            (len(layers), 4096, 1024), "bfloat16", (None, None, "shared_intermediate"),
            sources=(
                Source("model.language_model.layers.{layer}.mlp.shared_expert.gate_proj.weight", (("transpose",),)),
                Source("model.layers.{layer}.mlp.shared_expert.gate_proj.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
        "shared_up": ArrayInfo(
            (len(layers), 4096, 1024), "bfloat16", (None, None, "shared_intermediate"),
            sources=(
                Source("model.language_model.layers.{layer}.mlp.shared_expert.up_proj.weight", (("transpose",),)),
                Source("model.layers.{layer}.mlp.shared_expert.up_proj.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
        "shared_down": ArrayInfo(
            (len(layers), 1024, 4096), "bfloat16", (None, "shared_intermediate", None),
            sources=(
                Source("model.language_model.layers.{layer}.mlp.shared_expert.down_proj.weight", (("transpose",),)),
                Source("model.layers.{layer}.mlp.shared_expert.down_proj.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
        "shared_router": ArrayInfo(
            (len(layers), 4096, 1), "bfloat16", (None, None, None),
            sources=(
                Source("model.language_model.layers.{layer}.mlp.shared_expert_gate.weight", (("transpose",),)),
                Source("model.layers.{layer}.mlp.shared_expert_gate.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
    }


def moe_stack(layers):
    """moe weights of all its layers in one stack, which no loop slices."""
    return {
        "w_gate": ArrayInfo(
            (len(layers), 512, 4096, 1024), "float8_e4m3fn", (None, "experts", None, "expert_intermediate"),
            sources=(
                Source("model.language_model.layers.{layer}.mlp.experts.gate_up_proj", (("slice", -2, 0, 1024), ("transpose",))),
                Source("model.layers.{layer}.mlp.experts.gate_up_proj", (("slice", -2, 0, 1024), ("transpose",))),
                Source("model.language_model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", (("transpose",),)),
                Source("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
        "w_gate_scale": ArrayInfo(
            (len(layers), 512, 32, 8), "float32", (None, "experts", None, "expert_intermediate"),
            layers=layers,
            scale_of="w_gate",
        ),
        "w_up": ArrayInfo(
            (len(layers), 512, 4096, 1024), "float8_e4m3fn", (None, "experts", None, "expert_intermediate"),
            sources=(
                Source("model.language_model.layers.{layer}.mlp.experts.gate_up_proj", (("slice", -2, 1024, 2048), ("transpose",))),
                Source("model.layers.{layer}.mlp.experts.gate_up_proj", (("slice", -2, 1024, 2048), ("transpose",))),
                Source("model.language_model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", (("transpose",),)),
                Source("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
        "w_up_scale": ArrayInfo(
            (len(layers), 512, 32, 8), "float32", (None, "experts", None, "expert_intermediate"),
            layers=layers,
            scale_of="w_up",
        ),
        "w_down": ArrayInfo(
            (len(layers), 512, 1024, 4096), "float8_e4m3fn", (None, "experts", "expert_intermediate", None),
            sources=(
                Source("model.language_model.layers.{layer}.mlp.experts.down_proj", (("transpose",),)),
                Source("model.layers.{layer}.mlp.experts.down_proj", (("transpose",),)),
                Source("model.language_model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", (("transpose",),)),
                Source("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
        "w_down_scale": ArrayInfo(
            (len(layers), 512, 8, 32), "float32", (None, "experts", "expert_intermediate", None),
            layers=layers,
            scale_of="w_down",
        ),
    }


def gqa_weights(layers):
    """gqa weights of the given layers."""
    return {
        "w_q": ArrayInfo(
            (len(layers), 4096, 16384), "bfloat16", (None, None, "q_heads"),
            sources=(
                Source("model.language_model.layers.{layer}.self_attn.q_proj.weight", (("transpose",),)),
                Source("model.layers.{layer}.self_attn.q_proj.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
        "w_k": ArrayInfo(
            (len(layers), 4096, 512), "bfloat16", (None, None, "kv_heads"),
            sources=(
                Source("model.language_model.layers.{layer}.self_attn.k_proj.weight", (("transpose",),)),
                Source("model.layers.{layer}.self_attn.k_proj.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
        "w_v": ArrayInfo(
            (len(layers), 4096, 512), "bfloat16", (None, None, "kv_heads"),
            sources=(
                Source("model.language_model.layers.{layer}.self_attn.v_proj.weight", (("transpose",),)),
                Source("model.layers.{layer}.self_attn.v_proj.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
        "w_o": ArrayInfo(
            (len(layers), 8192, 4096), "bfloat16", (None, "q_heads", None),
            sources=(
                Source("model.language_model.layers.{layer}.self_attn.o_proj.weight", (("transpose",),)),
                Source("model.layers.{layer}.self_attn.o_proj.weight", (("transpose",),)),
            ),
            layers=layers,
        ),
        "q_norm": ArrayInfo(
            (len(layers), 256), "bfloat16", (None, None),
            sources=(
                Source("model.language_model.layers.{layer}.self_attn.q_norm.weight"),
                Source("model.layers.{layer}.self_attn.q_norm.weight"),
            ),
            layers=layers,
            init="gain",
        ),
        "k_norm": ArrayInfo(
            (len(layers), 256), "bfloat16", (None, None),
            sources=(
                Source("model.language_model.layers.{layer}.self_attn.k_norm.weight"),
                Source("model.layers.{layer}.self_attn.k_norm.weight"),
            ),
            layers=layers,
            init="gain",
        ),
    }


def mixer_norm_weights(layers):
    """A parameter of a norm of the given layers."""
    return ArrayInfo(
        (len(layers), 4096), "bfloat16", (None, None),
        sources=(
            Source("model.language_model.layers.{layer}.input_layernorm.weight"),
            Source("model.layers.{layer}.input_layernorm.weight"),
        ),
        layers=layers,
        init="gain",
    )


def ffn_norm_weights(layers):
    """A parameter of a norm of the given layers."""
    return ArrayInfo(
        (len(layers), 4096), "bfloat16", (None, None),
        sources=(
            Source("model.language_model.layers.{layer}.post_attention_layernorm.weight"),
            Source("model.layers.{layer}.post_attention_layernorm.weight"),
        ),
        layers=layers,
        init="gain",
    )


def weights():
    """Every array of the program: scanned groups, expert stacks, vocabulary."""
    return {
        "embed": {
            "table": ArrayInfo(
                (248320, 4096), "bfloat16", ("embed_vocab", None),
                sources=(Source("model.language_model.embed_tokens.weight"), Source("model.embed_tokens.weight"),),
            ),
        },
        "group0": {
            "layer0": {
                "mixer_norm": mixer_norm_weights(tuple(range(0, 57, 4))),
                "ffn_norm": ffn_norm_weights(tuple(range(0, 57, 4))),
                "gdn": gdn_weights(tuple(range(0, 57, 4))),
                "moe": moe_weights(tuple(range(0, 57, 4))),
            },
            "layer1": {
                "mixer_norm": mixer_norm_weights(tuple(range(1, 58, 4))),
                "ffn_norm": ffn_norm_weights(tuple(range(1, 58, 4))),
                "gdn": gdn_weights(tuple(range(1, 58, 4))),
                "moe": moe_weights(tuple(range(1, 58, 4))),
            },
            "layer2": {
                "mixer_norm": mixer_norm_weights(tuple(range(2, 59, 4))),
                "ffn_norm": ffn_norm_weights(tuple(range(2, 59, 4))),
                "gdn": gdn_weights(tuple(range(2, 59, 4))),
                "moe": moe_weights(tuple(range(2, 59, 4))),
            },
            "layer3": {
                "mixer_norm": mixer_norm_weights(tuple(range(3, 60, 4))),
                "ffn_norm": ffn_norm_weights(tuple(range(3, 60, 4))),
                "gqa": gqa_weights(tuple(range(3, 60, 4))),
                "moe": moe_weights(tuple(range(3, 60, 4))),
            },
        },
        "stacks": {
            "moe": moe_stack(tuple(range(0, 60, 1))),
        },
        "final_norm": ArrayInfo(
            (4096,), "bfloat16", (None,),
            sources=(Source("model.language_model.norm.weight"), Source("model.norm.weight"),),
            init="gain",
        ),
        "head": {
            "w": ArrayInfo(
                (4096, 248320), "bfloat16", (None, "head_vocab"),
                sources=(Source("lm_head.weight", (("transpose",),)),),
            ),
        },
    }
