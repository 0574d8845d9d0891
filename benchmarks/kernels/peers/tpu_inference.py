"""tpu-inference's kernels at one device's share of Qwen3.5-397B (DP8/EP8, decode), from a checkout the user has.

Beside them the grouped GEMM of tokamax, which its serving path imports by now; it needs jax >= 0.11.

Call shapes as its serving path makes them; tile sizes are its own choices. See stubs.py for how they load.
"""

import math

import jax.numpy as jnp

from benchmarks.kernels.case import Arg, Case

from .stubs import kernel, tokamax_kernel

SEQS, V_HEADS, QK_HEADS, HEAD, TAPS = 64, 64, 16, 128, 4
HIDDEN, INNER, EXPERTS, LOCAL_EXPERTS, TOP_K = 4096, 1024, 512, 64, 10
ROWS = 8 * SEQS * TOP_K
LOCAL_ROWS = ROWS // (EXPERTS // LOCAL_EXPERTS)
TOKAMAX_GMM = "tokamax/_src/ops/experimental/gmm_v2/gmm_v2.py"
Q_HEADS, KV_HEADS, HEAD_DIM, CONTEXT, PAGE = 32, 2, 256, 8192, 256


def _gdn_decode(chip, mesh, tiles):
    rule = kernel("gdn.v2.gdn_decode_kernel").ragged_gated_delta_rule_decode_only

    def run(mixed, b, a, state, a_log, dt_bias, starts, slots, distribution):
        sizes = {"n_kq": QK_HEADS, "n_v": V_HEADS, "d_k": HEAD, "d_v": HEAD}
        return rule(mixed, b, a, state, a_log, dt_bias, starts, slots, distribution, **sizes)

    return run


def _gdn_case(dtype, block):
    width = 2 * QK_HEADS * HEAD + V_HEADS * HEAD
    state = Arg((SEQS + 1, V_HEADS, HEAD, HEAD), dtype)
    gates, heads = Arg((SEQS, V_HEADS), "float32"), Arg((V_HEADS,), "float32")
    return Case(
        name=f"gdn-v2-decode-{dtype}",
        block="gated_delta",
        variant="tpu-inference",
        build=_gdn_decode,
        args=(
            Arg((SEQS, width), "bfloat16"), gates, gates, state, heads, heads,
            Arg((SEQS + 1,), "int32"), Arg((SEQS,), "int32"), Arg((3,), "int32"),
        ),
        donate=(3,),
        unit="sequence",
        units=SEQS,
        floor_bytes=2 * SEQS * V_HEADS * HEAD * HEAD * jnp.dtype(dtype).itemsize,
        kernels=("decoding_gdn.*",),
        # One grid step; inside it a pipeline over blocks of `block` sequences.
        trips={"decoding_gdn.*": {"I0.L0": 1, "I0.L0.I0.I0.I0.L0": SEQS / block}},
        limit_s=600,
    )  # fmt: skip


def _gdn_v3(v_heads, qk_heads):
    def build(chip, mesh, tiles):
        fused = kernel("gdn.v3.wrapper").fused_conv1d_gdn

        def run(*args):
            sizes = {"n_kq": qk_heads, "n_v": v_heads, "d_k": HEAD, "d_v": HEAD, "kernel_size": TAPS}
            mixed, b, a, conv, state, weight, a_log, dt_bias, starts, slots, distribution, lens = args
            return fused(
                mixed, b, a, conv, state, weight, None, a_log, dt_bias, starts, slots, distribution, lens, **sizes
            )

        return run

    return build


def _gdn_v3_case(name, v_heads, qk_heads, tiles):
    """Convolution fused in, states in bfloat16. Its float32 copy of the convolution's pool stands around them."""
    width = (2 * qk_heads + v_heads) * HEAD
    gates, heads = Arg((SEQS, v_heads), "bfloat16"), Arg((v_heads,), "float32")
    return Case(
        name=name,
        block="gated_delta",
        variant="tpu-inference",
        build=_gdn_v3(v_heads, qk_heads),
        args=(
            Arg((SEQS, width), "bfloat16"), gates, gates, Arg((SEQS + 1, TAPS - 1, width), "bfloat16"),
            Arg((SEQS + 1, v_heads, HEAD, HEAD), "bfloat16"), Arg((width, 1, TAPS), "bfloat16"), heads, heads,
            Arg((SEQS + 1,), "int32"), Arg((SEQS,), "int32"), Arg((3,), "int32"), Arg((SEQS,), "int32"),
        ),
        donate=(3, 4),
        kernels=("fused_conv1d_gdn_batched",),
        # Tiles of four sequences; every loop inside a tile moves one of its blocks. The other kernel has no tile.
        trips={"fused_conv1d_gdn_batched": {tiles: SEQS / 4, "*": 1}, "fused_conv1d_gdn_per_seq": {"I0": 0}},
        unit="sequence" if v_heads == V_HEADS else f"sequence of {v_heads} heads",
        units=SEQS,
        floor_bytes=2 * SEQS * (v_heads * HEAD * HEAD + (TAPS - 1) * width) * 2,
        limit_s=600,
    )  # fmt: skip


def _gmm(act, source):
    def build(chip, mesh, tiles):
        gmm_v2 = (tokamax_kernel(TOKAMAX_GMM) if source == "tokamax" else kernel("megablox.gmm_v2")).gmm_v2

        def run(lhs, rhs, sizes, scale, offset):
            return gmm_v2(
                lhs, rhs, sizes, scale, group_offset=offset, zero_initialize=False, fuse_act=act,
                preferred_element_type=jnp.bfloat16,
            )  # fmt: skip

        return run

    return build


def _gmm_case(name, act, k, n, dtype, blocks, source="tpu-inference"):
    out = n // 2 if act else n
    scale = Arg((LOCAL_EXPERTS, blocks, 1, n), "float32") if blocks else None
    return Case(
        name=name,
        block="moe",
        variant=source,
        build=_gmm(act, source),
        args=(
            Arg((ROWS, k), "bfloat16"), Arg((LOCAL_EXPERTS, k, n), dtype), Arg((EXPERTS,), "int32"),
            scale, Arg((1,), "int32"),
        ),
        unit="expert",
        units=LOCAL_EXPERTS,
        floor_bytes=LOCAL_EXPERTS * k * n * jnp.dtype(dtype).itemsize + LOCAL_ROWS * (k + out) * 2,
        kernels=("gmm.*",),
        # Tiles are listed (L0: one pass per expert), then worked on (I0.L0): one tile of rows per expert and all of
        # its columns in one. Ten rows an expert take the last of the row buckets, of 128 rows.
        trips={"gmm.*": {"L0": LOCAL_EXPERTS, "L0.I0.I0.L0": 1, "I0.L0": LOCAL_EXPERTS, "I0.L0.I0": 0}},
        limit_s=600,
    )  # fmt: skip


def _rpa(module):
    def build(chip, mesh, tiles):
        attention = kernel(module).ragged_paged_attention

        def run(q, k, v, cache, lens, pages, starts, distribution):
            scales = {"k_scale": 1.0, "v_scale": 1.0} if cache.dtype != jnp.bfloat16 else {}
            return attention(q, k, v, cache, lens, pages, starts, distribution, sm_scale=HEAD_DIM**-0.5, **scales)

        return run

    return build


def _v3_trips(update):
    """One pass per sequence, whose whole context is one block of keys; the first starts the fetches (L0.I0).

    update: the loop that writes the new key's page. The mixed kernel is launched and has no sequence.
    """
    block = "L0.I1.I0.L0"
    return {
        "RPAd.*": {"L0": SEQS, "L0.I0": 1 / SEQS, block: 1, f"{block}.{update}": 1, f"{block}.I2.L0": 1},
        "RPAm.*": {"L0": 0},
    }


_V3_FP8, _V3_BF16 = _v3_trips("I1.I0.L0"), _v3_trips("I1.L0")


def _batched_trips(block, fetch, run, idle):
    """Steps of eight sequences by `block` keys, two ahead; around them its schedule and an idle mixed kernel.

    fetch, run: the loops that fetch ahead and that work. idle: regions of the mixed kernel's loops.
    """
    blocks = math.ceil(CONTEXT / block)
    lanes = {f"I{lane}.L0": 4 for lane in range(1, 9)}
    steps = {f"{run}.L0": SEQS // 8 * blocks, f"{run}.L0.I0.L0": 1, f"{run}.L0.I1.L0": 1}
    return {
        "RPAd.*": {"I0.L0": 2, fetch: 2, **steps},
        "RPAm.*": dict.fromkeys(idle, 0),
        r"rpa_metadata_schedule\.3": {"I0.L0": SEQS, "I0.L0.I0.L0": 1, "I0.L0.I0.L0.I0.L0": blocks, **lanes},
        r"rpa_metadata_schedule\.2": {"I0.L0": 0, "L0": 4},
    }


_BATCHED_FP8 = _batched_trips(1792, "L0", "I1", ("L0", "L1", "I0"))
_BATCHED_BF16 = _batched_trips(512, "I1.L0", "I2", ("L0", "I0", "I1"))


def _rpa_case(name, module, dtype, kernels, trips):
    size = jnp.dtype(dtype).itemsize
    packing = 4 // size
    pages = SEQS * CONTEXT // PAGE
    cache = Arg((pages + 1, PAGE, -(-2 * KV_HEADS // packing), packing, HEAD_DIM), dtype)
    new = Arg((SEQS, KV_HEADS, HEAD_DIM), dtype)
    return Case(
        name=name,
        block="attention",
        variant="tpu-inference",
        build=_rpa(module),
        args=(
            Arg((SEQS, Q_HEADS, HEAD_DIM), "bfloat16"), new, new, cache,
            Arg((SEQS,), "int32"), Arg((pages,), "int32"), Arg((SEQS + 1,), "int32"), Arg((3,), "int32"),
        ),
        donate=(0, 3),
        unit="KV token",
        units=SEQS * CONTEXT,
        floor_bytes=SEQS * CONTEXT * KV_HEADS * 2 * HEAD_DIM * size,
        kernels=kernels,
        trips=trips,
        limit_s=600,
    )  # fmt: skip


CASES = (
    _gdn_case("float32", 4),
    _gdn_case("bfloat16", 8),
    _gdn_v3_case("gdn-v3-decode-16-heads", V_HEADS // 4, QK_HEADS // 4, "I0.I32.L0"),
    _gdn_v3_case("gdn-v3-decode", V_HEADS, QK_HEADS, "I0.I24.L0"),
    _gmm_case("gmm-v2-w1-fp8", "silu", HIDDEN, 2 * INNER, "float8_e4m3fn", 1),
    _gmm_case("gmm-v2-w2-fp8", None, INNER, HIDDEN, "float8_e4m3fn", 1),
    _gmm_case("gmm-v2-w1-fp8-128", "silu", HIDDEN, 2 * INNER, "float8_e4m3fn", HIDDEN // 128),
    _gmm_case("gmm-v2-w2-fp8-128", None, INNER, HIDDEN, "float8_e4m3fn", INNER // 128),
    _gmm_case("gmm-v2-w1-bf16", "silu", HIDDEN, 2 * INNER, "bfloat16", 0),
    _gmm_case("tokamax-gmm-v2-w2-fp8", None, INNER, HIDDEN, "float8_e4m3fn", 1, source="tokamax"),
    _rpa_case("rpa-v3-decode-fp8", "ragged_paged_attention.v3.kernel", "float8_e4m3fn", ("RPA.*",), _V3_FP8),
    _rpa_case("rpa-v3-decode-bf16", "ragged_paged_attention.v3.kernel", "bfloat16", ("RPA.*",), _V3_BF16),
    _rpa_case("rpa-batched-decode-fp8", "experimental.batched_rpa.wrapper", "float8_e4m3fn", ("RPAd.*",), _BATCHED_FP8),
    _rpa_case("rpa-batched-decode-bf16", "experimental.batched_rpa.wrapper", "bfloat16", ("RPAd.*",), _BATCHED_BF16),
)
