# Emitted by moec; do not edit. Regenerate: moec compile tiny/qwen3_5_moe --target cpu --workload default
# Digests: spec 2e982e786557aadc, target a9134ae57537eb7d, workload aff6b214b470e3f4, overrides 4f53cda18c2baa0c, plan 4ea8eed89226ffae
"""Weights of tiny_qwen3_5_moe as the program holds them, and where a checkpoint keeps them.

`sources` are alternatives: the loader takes the first whose tensors are all there. {layer} and
{expert} stand for indices; ops turn the stored tensor into the program's (see blocks/core/array_info.py).
"""

from moec.blocks.core.array_info import ArrayInfo, Source

IGNORE = (  # stored tensors this program does not use
)
SCALE_SUFFIX = None  # block scales of NAME are stored as NAME + suffix
SCALE_BLOCK = None  # rows x columns under one scale


def gdn_weights(layers):
    """gdn weights of the given layers."""
    return {
        "w_q": ArrayInfo(
            (len(layers), 64, 32), "float32", (None, None, "qk_heads"),
            sources=(
                Source("model.layers.{layer}.linear_attn.in_proj_qkv.weight", (("slice", -2, 0, 32), ("transpose",))),
            ),
            layers=layers,
        ),
        "w_k": ArrayInfo(
            (len(layers), 64, 32), "float32", (None, None, "qk_heads"),
            sources=(
                Source("model.layers.{layer}.linear_attn.in_proj_qkv.weight", (("slice", -2, 32, 64), ("transpose",))),
            ),
            layers=layers,
        ),
        "w_v": ArrayInfo(
            (len(layers), 64, 64), "float32", (None, None, "v_heads"),
            sources=(
                Source("model.layers.{layer}.linear_attn.in_proj_qkv.weight", (("slice", -2, 64, 128), ("transpose",))),
            ),
            layers=layers,
        ),
        "w_z": ArrayInfo(
            (len(layers), 64, 64), "float32", (None, None, "v_heads"),
            sources=(Source("model.layers.{layer}.linear_attn.in_proj_z.weight", (("transpose",),)),),
            layers=layers,
        ),
        "w_b": ArrayInfo(
            (len(layers), 64, 4), "float32", (None, None, "v_heads"),
            sources=(Source("model.layers.{layer}.linear_attn.in_proj_b.weight", (("transpose",),)),),
            layers=layers,
        ),
        "w_a": ArrayInfo(
            (len(layers), 64, 4), "float32", (None, None, "v_heads"),
            sources=(Source("model.layers.{layer}.linear_attn.in_proj_a.weight", (("transpose",),)),),
            layers=layers,
        ),
        "conv_q": ArrayInfo(
            (len(layers), 32, 4), "float32", (None, "qk_heads", None),
            sources=(Source("model.layers.{layer}.linear_attn.conv1d.weight", (("slice", -2, 0, 32),)),),
            layers=layers,
        ),
        "conv_k": ArrayInfo(
            (len(layers), 32, 4), "float32", (None, "qk_heads", None),
            sources=(Source("model.layers.{layer}.linear_attn.conv1d.weight", (("slice", -2, 32, 64),)),),
            layers=layers,
        ),
        "conv_v": ArrayInfo(
            (len(layers), 64, 4), "float32", (None, "v_heads", None),
            sources=(Source("model.layers.{layer}.linear_attn.conv1d.weight", (("slice", -2, 64, 128),)),),
            layers=layers,
        ),
        "a_log": ArrayInfo(
            (len(layers), 4), "float32", (None, "v_heads"),
            sources=(Source("model.layers.{layer}.linear_attn.A_log"),),
            layers=layers,
            init="log_decay",
        ),
        "dt_bias": ArrayInfo(
            (len(layers), 4), "float32", (None, "v_heads"),
            sources=(Source("model.layers.{layer}.linear_attn.dt_bias"),),
            layers=layers,
        ),
        "out_norm": ArrayInfo(
            (len(layers), 16), "float32", (None, None),
            sources=(Source("model.layers.{layer}.linear_attn.norm.weight"),),
            layers=layers,
            init="gain",
        ),
        "w_o": ArrayInfo(
            (len(layers), 64, 64), "float32", (None, "v_heads", None),
            sources=(Source("model.layers.{layer}.linear_attn.out_proj.weight", (("transpose",),)),),
            layers=layers,
        ),
    }


def moe_weights(layers):
    """moe weights of the given layers."""
    return {
        "router": ArrayInfo(
            (len(layers), 64, 8), "float32", (None, None, None),
            sources=(Source("model.layers.{layer}.mlp.gate.weight", (("transpose",),)),),
            layers=layers,
        ),
        "shared_gate": ArrayInfo(
            (len(layers), 64, 48), "float32", (None, None, "shared_intermediate"),
            sources=(Source("model.layers.{layer}.mlp.shared_expert.gate_proj.weight", (("transpose",),)),),
            layers=layers,
        ),
        "shared_up": ArrayInfo(
            (len(layers), 64, 48), "float32", (None, None, "shared_intermediate"),
            sources=(Source("model.layers.{layer}.mlp.shared_expert.up_proj.weight", (("transpose",),)),),
            layers=layers,
        ),
        "shared_down": ArrayInfo(
            (len(layers), 48, 64), "float32", (None, "shared_intermediate", None),
            sources=(Source("model.layers.{layer}.mlp.shared_expert.down_proj.weight", (("transpose",),)),),
            layers=layers,
        ),
        "shared_router": ArrayInfo(
            (len(layers), 64, 1), "float32", (None, None, None),
            sources=(Source("model.layers.{layer}.mlp.shared_expert_gate.weight", (("transpose",),)),),
            layers=layers,
        ),
    }


def moe_stack(layers):
    """moe weights of all its layers in one stack, which no loop slices."""
    return {
        "w_gate": ArrayInfo(
            (len(layers), 8, 64, 32), "float32", (None, "experts", None, "expert_intermediate"),
            sources=(Source("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", (("transpose",),)),),
            layers=layers,
        ),
        "w_up": ArrayInfo(
            (len(layers), 8, 64, 32), "float32", (None, "experts", None, "expert_intermediate"),
            sources=(Source("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", (("transpose",),)),),
            layers=layers,
        ),
        "w_down": ArrayInfo(
            (len(layers), 8, 32, 64), "float32", (None, "experts", "expert_intermediate", None),
            sources=(Source("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", (("transpose",),)),),
            layers=layers,
        ),
    }


def gqa_weights(layers):
    """gqa weights of the given layers."""
    return {
        "w_q": ArrayInfo(
            (len(layers), 64, 128), "float32", (None, None, "q_heads"),
            sources=(Source("model.layers.{layer}.self_attn.q_proj.weight", (("transpose",),)),),
            layers=layers,
        ),
        "w_k": ArrayInfo(
            (len(layers), 64, 32), "float32", (None, None, "kv_heads"),
            sources=(Source("model.layers.{layer}.self_attn.k_proj.weight", (("transpose",),)),),
            layers=layers,
        ),
        "w_v": ArrayInfo(
            (len(layers), 64, 32), "float32", (None, None, "kv_heads"),
            sources=(Source("model.layers.{layer}.self_attn.v_proj.weight", (("transpose",),)),),
            layers=layers,
        ),
        "w_o": ArrayInfo(
            (len(layers), 64, 64), "float32", (None, "q_heads", None),
            sources=(Source("model.layers.{layer}.self_attn.o_proj.weight", (("transpose",),)),),
            layers=layers,
        ),
        "q_norm": ArrayInfo(
            (len(layers), 16), "float32", (None, None),
            sources=(Source("model.layers.{layer}.self_attn.q_norm.weight"),),
            layers=layers,
            init="gain",
        ),
        "k_norm": ArrayInfo(
            (len(layers), 16), "float32", (None, None),
            sources=(Source("model.layers.{layer}.self_attn.k_norm.weight"),),
            layers=layers,
            init="gain",
        ),
    }


def mixer_norm_weights(layers):
    """A parameter of a norm of the given layers."""
    return ArrayInfo(
        (len(layers), 64), "float32", (None, None),
        sources=(Source("model.layers.{layer}.input_layernorm.weight"),),
        layers=layers,
        init="gain",
    )


def ffn_norm_weights(layers):
    """A parameter of a norm of the given layers."""
    return ArrayInfo(
        (len(layers), 64), "float32", (None, None),
        sources=(Source("model.layers.{layer}.post_attention_layernorm.weight"),),
        layers=layers,
        init="gain",
    )


def weights():
    """Every array of the program: scanned groups, expert stacks, vocabulary."""
    return {
        "embed": {
            "table": ArrayInfo(
                (256, 64), "float32", ("embed_vocab", None),
                sources=(Source("model.embed_tokens.weight"),),
            ),
        },
        "group0": {
            "layer0": {
                "mixer_norm": mixer_norm_weights((0,)),
                "ffn_norm": ffn_norm_weights((0,)),
                "gdn": gdn_weights((0,)),
                "moe": moe_weights((0,)),
            },
            "layer1": {
                "mixer_norm": mixer_norm_weights((1,)),
                "ffn_norm": ffn_norm_weights((1,)),
                "gdn": gdn_weights((1,)),
                "moe": moe_weights((1,)),
            },
            "layer2": {
                "mixer_norm": mixer_norm_weights((2,)),
                "ffn_norm": ffn_norm_weights((2,)),
                "gdn": gdn_weights((2,)),
                "moe": moe_weights((2,)),
            },
            "layer3": {
                "mixer_norm": mixer_norm_weights((3,)),
                "ffn_norm": ffn_norm_weights((3,)),
                "gqa": gqa_weights((3,)),
                "moe": moe_weights((3,)),
            },
        },
        "stacks": {
            "moe": moe_stack(tuple(range(0, 4, 1))),
        },
        "final_norm": ArrayInfo((64,), "float32", (None,), sources=(Source("model.norm.weight"),), init="gain"),
        "head": {
            "w": ArrayInfo(
                (64, 256), "float32", (None, "head_vocab"),
                sources=(Source("lm_head.weight", (("transpose",),)),),
            ),
        },
    }
