"""Router in one Pallas kernel: gate projection, scores, top-k, weights; nothing is sorted and no logits leave the chip.

Legend: T tokens, D hidden, E experts, K top_k; in the kernel R rows (tokens) worked on at once, F pairs of vectors of
128 experts. Meaning: ref.py; same-signature reference: xla.py.

How the best K are found: a reduction over lanes is slow (it occupies its unit for eight bundles), one over sublanes is
a few ordinary operations. So the scores are turned: experts on sublanes, tokens on lanes, half of the experts beside
the other half, since 64 tokens leave half of the lanes free. The experts then form lists of _ROUTER_DEPTH, ordered
once; a round compares only the heads of the lists, and the list that won moves its next value up.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..core.chip import ChipLimits
from ..core.norm import rms_norm
from .names import Score, Weighing

# Rows worked on at once: with both halves of the experts they fill the lanes.
_ROUTER_ROWS = 64
_ROUTER_DEPTH = 4
_ROUTER_PART_BITS = 2
_ROUTER_LANES = 128


class _RouterRules(NamedTuple):
    """The static options of route(), with the names and defaults of xla.py."""

    top_k: int
    logits_dtype: Literal["activation", "float32"] = "activation"
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    score: Score = "softmax"
    correct: Literal["score", "logit"] = "score"
    num_groups: int | None = None
    keep_groups: int = 1
    group_metric: Literal["top2_sum", "max"] = "top2_sum"
    group_masked: Literal["-inf", "zero"] = "-inf"
    weights: Weighing = "score"
    renormalize: bool = True
    renorm_power: float = 1.0
    renorm_min: float | None = None
    renorm_eps: float = 1e-20
    scale: float = 1.0


class _RouterForm(NamedTuple):
    """What else the kernel is specialised on. names: of its vector inputs.

    packed: one result. rounds_logits, rounds_weights: to bfloat16.
    """

    num_experts: int
    rows: int
    names: tuple[str, ...]
    packed: bool
    rounds_logits: bool
    rounds_weights: bool


def route_fused(
    h_TD: Array,
    w_router: Array,
    *,
    top_k: int,
    norm_D: Array | None = None,
    norm_eps: float = 1e-6,
    norm_zero_centered: bool = False,
    logits_dtype: Literal["activation", "float32"] = "activation",
    bias_E: Array | None = None,
    logits_scale: float = 1.0,
    logits_softcap: float | None = None,
    score: Score = "softmax",
    correction_E: Array | None = None,
    correct: Literal["score", "logit"] = "score",
    num_groups: int | None = None,
    keep_groups: int = 1,
    group_metric: Literal["top2_sum", "max"] = "top2_sum",
    group_masked: Literal["-inf", "zero"] = "-inf",
    weights: Weighing = "score",
    jitter: float = 0.01,
    renormalize: bool = True,
    renorm_power: float = 1.0,
    renorm_min: float | None = None,
    renorm_eps: float = 1e-20,
    scale: float = 1.0,
    expert_scale_E: Array | None = None,
    cast: bool = True,
    chip: ChipLimits,
    route_tokens: int,
    route_hidden: int,
) -> tuple[Array, Array]:
    """Pick top_k experts per token -> (index [T, K] int32, weight [T, K] in h's dtype, float32 without cast).

    route_tokens: tokens of one block, whole groups of 64, no more of them than T takes; route_hidden: rows of w_router
    that are multiplied while the next ones arrive, a divisor of D.
    Which options are not in this kernel: tpu_cost.refuse.
    """
    assert weights != "sparsemixer", f"weights {weights!r} (jitter {jitter}) are not in this kernel"
    rules = _RouterRules(
        top_k=top_k,
        logits_dtype=logits_dtype,
        logits_scale=logits_scale,
        logits_softcap=logits_softcap,
        score=score,
        correct=correct,
        num_groups=num_groups,
        keep_groups=keep_groups,
        group_metric=group_metric,
        group_masked=group_masked,
        weights=weights,
        renormalize=renormalize,
        renorm_power=renorm_power,
        renorm_min=renorm_min,
        renorm_eps=renorm_eps,
        scale=scale,
    )
    if norm_D is not None:
        h_TD = rms_norm(h_TD, norm_D, eps=norm_eps, zero_centered=norm_zero_centered)
    vectors = {"bias": bias_E, "correction": correction_E, "expert_scale": expert_scale_E}
    index_TK, weight_TK = _router_call(h_TD, w_router, vectors, rules, cast, False, chip, (route_tokens, route_hidden))
    return index_TK, weight_TK


def route_packed_fused(
    h_TD: Array,
    w_router: Array,
    *,
    valid_T: Array | None = None,
    norm_D: Array | None = None,
    norm_eps: float = 1e-6,
    norm_zero_centered: bool = False,
    bias_E: Array | None = None,
    correction_E: Array | None = None,
    expert_scale_E: Array | None = None,
    cast: bool = True,
    chip: ChipLimits,
    route_tokens: int,
    route_hidden: int,
    **rules: Any,
) -> Array:
    """route_fused in the form that travels: [T, 2K] int32, K indices and the bits of K weights as float32.

    valid_T bool [T]: a token that is not valid visits no expert, index -1. rules: the other options of route_fused.
    cast: the weights are rounded to h's dtype before they widen.
    """
    if norm_D is not None:
        h_TD = rms_norm(h_TD, norm_D, eps=norm_eps, zero_centered=norm_zero_centered)
    vectors = {"bias": bias_E, "correction": correction_E, "expert_scale": expert_scale_E, "valid": valid_T}
    tiles = route_tokens, route_hidden
    return _router_call(h_TD, w_router, vectors, _RouterRules(**rules), cast, True, chip, tiles)[0]


def _router_call(
    h_TD: Array,
    w_router: Array,
    vectors: dict[str, Array | None],
    rules: _RouterRules,
    cast: bool,
    packed: bool,
    chip: ChipLimits,
    tiles: tuple[int, int],
) -> Sequence[Array]:
    """The kernel over blocks of tokens and, inside, of hidden."""
    (tokens, hidden), experts = h_TD.shape, w_router.shape[1]
    rows, (block, depth) = _ROUTER_ROWS, tiles
    assert block % rows == 0 < block < tokens + rows, f"{tokens} tokens in blocks of {block}: multiples of {rows}"
    assert hidden % depth == 0, f"hidden {hidden} in pieces of {depth}"
    padded = -(-experts // _ROUTER_LANES) * _ROUTER_LANES
    used = {name: vector for name, vector in vectors.items() if vector is not None}
    operands = [_router_operand(name, one, h_TD.dtype, rules, padded) for name, one in used.items()]
    is_bf16 = h_TD.dtype == jnp.bfloat16
    form = _RouterForm(
        num_experts=experts,
        rows=rows,
        names=tuple(used),
        packed=packed,
        rounds_logits=is_bf16 and rules.logits_dtype == "activation",
        rounds_weights=is_bf16 and cast,
    )
    widths = (
        [(2 * rules.top_k, jnp.int32)]
        if packed
        else [(rules.top_k, jnp.int32), (rules.top_k, h_TD.dtype if cast else jnp.float32)]
    )
    by_token = {"valid": pl.BlockSpec((block, 1), lambda t, d: (t, 0))}
    whole = pl.BlockSpec((1, padded), lambda t, d: (0, 0))
    return pl.pallas_call(
        partial(_router_kernel, rules=rules, form=form),
        name="router_fused",
        grid=(-(-tokens // block), hidden // depth),
        in_specs=[
            pl.BlockSpec((block, depth), lambda t, d: (t, d)),
            pl.BlockSpec((depth, experts), lambda t, d: (d, 0)),
            *(by_token.get(name, whole) for name in used),
        ],
        out_specs=[pl.BlockSpec((block, width), lambda t, d: (t, 0)) for width, _ in widths],
        out_shape=[jax.ShapeDtypeStruct((tokens, width), dtype) for width, dtype in widths],
        scratch_shapes=[pltpu.VMEM((block, padded), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=chip.vmem_bytes
        ),
    )(h_TD, w_router, *operands)


def _router_operand(name: str, vector: Array, dtype: jnp.dtype, rules: _RouterRules, padded: int) -> Array:
    """A vector as the kernel takes it: of experts [1, E up to whole vectors] float32, of tokens [T, 1] int32."""
    if name == "valid":
        return vector.astype(jnp.int32)[:, None]
    if name == "bias" and rules.logits_dtype == "activation":
        vector = vector.astype(dtype)
    return jnp.pad(vector.astype(jnp.float32)[None], ((0, 0), (0, padded - vector.shape[0])))


def _router_kernel(h_ref: Any, w_ref: Any, *refs: Any, rules: _RouterRules, form: _RouterForm) -> None:
    """One step: multiply a slice of hidden into the logits; after the last one, choose."""
    *others, logits_ref = refs
    vector_refs, out_refs = dict(zip(form.names, others, strict=False)), others[len(form.names) :]
    step, top_k = pl.program_id(1), rules.top_k

    @pl.when(step == 0)
    def _() -> None:
        logits_ref[...] = jnp.zeros(logits_ref.shape, jnp.float32)

    logits_ref[:, : form.num_experts] += _router_product(h_ref[...], w_ref[...], rules)

    @pl.when(step == pl.num_programs(1) - 1)
    def _() -> None:
        def choose(i: Array, _: None) -> None:
            at = pl.ds(pl.multiple_of(i * form.rows, form.rows), form.rows)
            index, weight = _router_choose(logits_ref, at, vector_refs, rules, form)
            # One turn for both: choices from sublanes to lanes.
            bits = lax.bitcast_convert_type(weight, jnp.int32)
            both = jnp.concatenate([index[:top_k], bits[:top_k]], axis=0).T[: form.rows]
            if "valid" in vector_refs:
                lane = lax.broadcasted_iota(jnp.int32, both.shape, 1)
                keep = (vector_refs["valid"][at, :] != 0) | (lane >= top_k)
                both = jnp.where(keep, both, -1)
            if form.packed:
                out_refs[0][at, :] = both
                return
            out_refs[0][at, :] = both[:, :top_k]
            weight = lax.bitcast_convert_type(both[:, top_k:], jnp.float32)
            out_refs[1][at, :] = weight.astype(out_refs[1].dtype)

        lax.fori_loop(0, logits_ref.shape[0] // form.rows, choose, None)


def _router_product(h: Array, w: Array, rules: _RouterRules) -> Array:
    """h w in float32. A float32 product is made of bfloat16 ones, as many as the operands have significant parts."""
    if rules.logits_dtype == "activation":
        precision = lax.Precision.HIGHEST if h.dtype == jnp.float32 else None
        return jnp.dot(h, w.astype(h.dtype), preferred_element_type=jnp.float32, precision=precision)
    if jnp.bfloat16 not in (h.dtype, w.dtype):
        return jnp.dot(h, w, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)
    # One operand is a bfloat16 value: three products are exact where HIGHEST would take six.
    total = None
    for a in _router_parts(h):
        for b in _router_parts(w):
            product = jnp.dot(a, b, preferred_element_type=jnp.float32)
            total = product if total is None else total + product
    assert total is not None
    return total


def _router_parts(x: Array) -> list[Array]:
    """bfloat16 arrays whose sum is x, the least significant first. Cut, not rounded, so that each rest is exact."""
    if x.dtype == jnp.bfloat16:
        return [x]
    found: list[Array] = []
    for _ in range(2):
        high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -65536, jnp.float32)
        found.insert(0, high.astype(jnp.bfloat16))
        x = x - high
    return [x.astype(jnp.bfloat16), *found]


def _router_rounded(x: Array) -> Array:
    """float32 rounded to bfloat16 (nearest, ties to even) by its bits: a cast and back could be simplified away."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = bits + 0x7FFF + (lax.shift_right_logical(bits, 16) & 1)
    return lax.bitcast_convert_type(bits & -65536, jnp.float32)


def _router_choose(
    logits_ref: Any, at: Any, vector_refs: dict[str, Any], rules: _RouterRules, form: _RouterForm
) -> tuple[Array, Array]:
    """(index, weight) of the rows `at`, [K up to 8s, 2R]: choices on sublanes, every row twice on lanes."""
    cuts = [slice(c, c + _ROUTER_LANES) for c in range(0, logits_ref.shape[1], _ROUTER_LANES)]
    vectors = {name: [ref[:, cut] for cut in cuts] for name, ref in vector_refs.items() if name != "valid"}
    logits = _router_logits([logits_ref[at, cut] for cut in cuts], vectors.get("bias"), rules, form)
    lane = lax.broadcasted_iota(jnp.int32, logits[0].shape, 1)
    spare = form.num_experts % _ROUTER_LANES
    if spare:
        logits[-1] = jnp.where(lane < spare, logits[-1], -jnp.inf)
    score = _router_scores(logits, rules.score)
    select, source = score, score if rules.weights == "score" else logits
    if "correction" in vectors:
        base = score if rules.correct == "score" else logits
        select = [x + y for x, y in zip(base, vectors["correction"], strict=True)]
    if rules.num_groups is not None:
        index = [(lane + cut.start).astype(jnp.float32) for cut in cuts]
        select = _router_mask_groups(select, index, rules, form)
    if spare:
        select[-1] = jnp.where(lane < spare, select[-1], -jnp.inf)
    # What is carried along with the values that are compared.
    carried = {} if source is select else {"source": source}
    if "expert_scale" in vectors:
        carried["expert_scale"] = [jnp.broadcast_to(x, lane.shape) for x in vectors["expert_scale"]]
    folded = {name: _router_turned(vectors, 0.0) for name, vectors in carried.items()}
    found = _router_rounds(_router_turned(select, -jnp.inf), folded, rules)
    weight = _router_weigh(found.get("source", found["value"]), rules)
    if "expert_scale" in found:
        weight = weight * found["expert_scale"]
    weight = _router_rounded(weight) if form.rounds_weights else weight
    # A row of NaN finds nothing; its indices stay in range.
    return jnp.minimum(found["index"], jnp.float32(form.num_experts - 1)).astype(jnp.int32), weight


def _router_logits(
    logits: list[Array], bias: list[Array] | None, rules: _RouterRules, form: _RouterForm
) -> list[Array]:
    """What xla.py makes of the product: bias, rounding to the activations' dtype, scale, cap."""
    if bias is not None:
        logits = [x + y for x, y in zip(logits, bias, strict=True)]
    if form.rounds_logits:
        logits = [_router_rounded(x) for x in logits]
    if rules.logits_scale != 1:
        logits = [x * rules.logits_scale for x in logits]
    if rules.logits_softcap is not None:
        cap = rules.logits_softcap
        logits = [jnp.tanh(x / cap) * cap for x in logits]
    return logits


def _router_scores(logits: list[Array], score: Score) -> list[Array]:
    """Scores of all experts of a row; lanes beyond the experts hold -inf and stay out of the softmax."""
    if score == "softmax":
        peak = jnp.max(_router_fold(jnp.maximum, logits), axis=1, keepdims=True)
        shares = [jnp.exp(x - peak) for x in logits]
        total = jnp.sum(_router_fold(jnp.add, shares), axis=1, keepdims=True)
        return [x / total for x in shares]
    if score == "sigmoid":
        return [jax.nn.sigmoid(x) for x in logits]
    if score == "sqrt_softplus":
        return [jnp.sqrt(jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))) for x in logits]
    return list(logits)


def _router_fold(combine: Callable[[Array, Array], Array], vectors: list[Array]) -> Array:
    """All vectors combined lane by lane, as a tree."""
    while len(vectors) > 1:
        pairs = [combine(*vectors[i : i + 2]) for i in range(0, len(vectors) - 1, 2)]
        vectors = pairs + vectors[2 * len(pairs) :]
    return vectors[0]


def _router_mask_groups(select: list[Array], index: list[Array], rules: _RouterRules, form: _RouterForm) -> list[Array]:
    """Values outside the best keep_groups groups become -inf or 0."""
    assert rules.num_groups is not None
    size = form.num_experts // rules.num_groups
    inside = [[(i >= g * size) & (i < (g + 1) * size) for i in index] for g in range(rules.num_groups)]
    metric = [_router_group_metric(select, index, mine, rules.group_metric) for mine in inside]
    masked = [jnp.full(x.shape, -jnp.inf if rules.group_masked == "-inf" else 0.0, jnp.float32) for x in select]
    for g, own in enumerate(metric):
        # A group is kept when fewer than keep_groups come before it; of equals the lower one comes first.
        before = [
            (other >= own if o < g else other > own).astype(jnp.float32) for o, other in enumerate(metric) if o != g
        ]
        kept = _router_fold(jnp.add, before) < rules.keep_groups
        masked = [jnp.where(mine & kept, x, y) for mine, x, y in zip(inside[g], select, masked, strict=True)]
    return masked


def _router_group_metric(
    select: list[Array], index: list[Array], mine: list[Array], metric: Literal["top2_sum", "max"]
) -> Array:
    """What a group counts, [R, 1]."""
    values = [jnp.where(m, x, -jnp.inf) for m, x in zip(mine, select, strict=True)]
    best = jnp.max(_router_fold(jnp.maximum, values), axis=1, keepdims=True)
    if metric == "max":
        return best
    places = [jnp.where(x == best, i, jnp.inf) for x, i in zip(values, index, strict=True)]
    place = jnp.min(_router_fold(jnp.minimum, places), axis=1, keepdims=True)
    rest = [jnp.where(i == place, -jnp.inf, x) for x, i in zip(values, index, strict=True)]
    return best + jnp.max(_router_fold(jnp.maximum, rest), axis=1, keepdims=True)


def _router_turned(vectors: list[Array], spare: float) -> Array:
    """[F*128, 2R]: experts on sublanes, rows on lanes; the first half of the experts left, the second half right."""
    half = (len(vectors) + 1) // 2
    vectors = vectors + [jnp.full(vectors[0].shape, spare, jnp.float32)] * (2 * half - len(vectors))
    pairs = [jnp.concatenate([vectors[f], vectors[half + f]], axis=0) for f in range(half)]
    return jnp.concatenate([pair.T for pair in pairs], axis=0)


def _router_other(x: Array) -> Array:
    """[1, 2R] with the halves of the lanes exchanged."""
    return pltpu.roll(x, x.shape[1] // 2, 1)


def _router_rounds(select: Array, carried: dict[str, Array], rules: _RouterRules) -> dict[str, Array]:
    """The K best of each row, best first, equals by index: value, index and what is carried, [K up to 8s, 2R] each."""
    size = select.shape[0] // _ROUTER_DEPTH
    shape = (size, select.shape[1])
    right = lax.broadcasted_iota(jnp.int32, shape, 1) >= shape[1] // 2
    place = lax.broadcasted_iota(jnp.int32, shape, 0) + jnp.where(right, select.shape[0], 0)
    cuts = [slice(d * size, (d + 1) * size) for d in range(_ROUTER_DEPTH)]
    lists = {name: [x[cut] for cut in cuts] for name, x in {"value": select, **carried}.items()}
    lists = _router_order(lists | {"part": [jnp.full(shape, d, jnp.int32) for d in range(_ROUTER_DEPTH)]})
    # Which part each value of a list came from, the best one's in the lowest bits: one array for all of a list.
    part = _router_fold(jnp.bitwise_or, [x << (_ROUTER_PART_BITS * d) for d, x in enumerate(lists.pop("part"))])
    found: dict[str, list[Array]] = {name: [] for name in ("index", *lists)}
    for k in range(rules.top_k):
        # float32 counts experts exactly, and has minimum as one operation.
        index = ((part & (_ROUTER_DEPTH - 1)) * size + place).astype(jnp.float32)
        head = lists["value"][0]
        best = jnp.max(head, axis=0, keepdims=True)
        first = jnp.min(jnp.where(head == best, index, jnp.inf), axis=0, keepdims=True)
        # The two halves exchange their winners; on the left there are the lower experts.
        other, other_first = _router_other(best), _router_other(first)
        lost = (other > best) | ((other == best) & (other_first < first))
        best, first = jnp.where(lost, other, best), jnp.where(lost, other_first, first)
        won = index == first
        found["value"].append(best)
        found["index"].append(first)
        for name in carried:
            mine = jnp.sum(jnp.where(won, lists[name][0], 0.0), axis=0, keepdims=True)
            found[name].append(mine + _router_other(mine))
        part = jnp.where(won, part >> _ROUTER_PART_BITS, part)
        # A list cannot win more often than there are rounds left.
        depth = min(_ROUTER_DEPTH, rules.top_k - k)
        for name, values in lists.items():
            end = jnp.full(shape, -jnp.inf if name == "value" else 0.0, jnp.float32)
            lists[name] = [jnp.where(won, y, x) for x, y in zip(values[:depth], [*values[1:], end], strict=False)]
    spare = [jnp.zeros((-rules.top_k % 8, shape[1]), jnp.float32)] if rules.top_k % 8 else []
    return {name: jnp.concatenate([*rows, *spare], axis=0) for name, rows in found.items()}


def _router_order(lists: dict[str, list[Array]]) -> dict[str, list[Array]]:
    """Lists by falling value. Only neighbours are exchanged, so that equals keep their order."""
    lists = {name: list(values) for name, values in lists.items()}
    for end in range(_ROUTER_DEPTH - 1, 0, -1):
        for i in range(end):
            swap = lists["value"][i + 1] > lists["value"][i]
            for values in lists.values():
                low, high = values[i], values[i + 1]
                values[i], values[i + 1] = jnp.where(swap, high, low), jnp.where(swap, low, high)
    return lists


def _router_weigh(picked: Array, rules: _RouterRules) -> Array:
    """Weights of the selected experts, zeros in the rows after them; picked: their scores or logits."""
    used = lax.broadcasted_iota(jnp.int32, picked.shape, 0) < rules.top_k
    if rules.weights == "softmax":
        shares = jnp.exp(picked - jnp.max(jnp.where(used, picked, -jnp.inf), axis=0, keepdims=True))
        picked = shares / jnp.sum(jnp.where(used, shares, 0.0), axis=0, keepdims=True)
    if rules.weights == "sigmoid":
        picked = jax.nn.sigmoid(picked)
    weight = jnp.where(used, picked, 0.0)
    if rules.renormalize:
        if rules.renorm_power == 1:
            total = jnp.sum(weight, axis=0, keepdims=True)
        else:
            total = jnp.sqrt(jnp.sum(weight * weight, axis=0, keepdims=True))
        total = total if rules.renorm_min is None else jnp.maximum(total, rules.renorm_min)
        weight = weight / (total + rules.renorm_eps)
    return weight * rules.scale if rules.scale != 1 else weight
