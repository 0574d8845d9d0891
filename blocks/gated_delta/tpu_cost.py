"""Work, tiles, vector memory and limits of Gated DeltaNet's Pallas kernels (tpu_fused.py), on one device. No jax."""

from collections.abc import Mapping
from math import ceil

from ..core.declare import ModelDims
from ..core.recurrence_work import chunk
from ..core.work import Gemm, Load, Stream, Term, Vector, itemsize, prefetched, tuned_key
from . import cost
from .block import Fields

# Prefill tokens solved at once, at most: two value heads of 64 tokens fill a matrix unit's lanes.
_MAX_CHUNK = 64
# Tokens the prefill convolution takes at once: a chunk is whole steps.
_CONV_STEP = 8
_DTYPES = ("bfloat16", "float32")
# Rows of a tile that hold one group's terms (tpu_fused_decode.py).
_TERM_ROWS = 8
# The compiler's own: semaphores, spilled registers, what a kernel's prologue keeps.
_SPARE_BYTES = 1 << 20
# What decides tiles, of one device. decay: per head or channel.
TUNED_BY = ("rows", "v_heads", "qk_heads", "state", "decay", "page")
# cost.py's terms of what the kernels do instead.
_REPLACED = ("convolve", "recur", "scan chunks")


def work(fields: Fields, dims: ModelDims, load: Load) -> tuple[Term, ...]:
    """As in cost.py, but for the convolution and the recurrence: windows and states move once in and once out."""
    kept = [term for term in cost.work(fields, dims, load) if term.op not in _REPLACED]
    after = next(place for place, term in enumerate(kept) if term.op == "project out")
    inputs = load.tokens * _conv_heads(fields, load) * fields.dk * itemsize(load.dtypes.activation)
    # The kernels want a token's heads below each other in tiles; the projection leaves them side by side.
    tiles = Stream("lay out heads", 2 * inputs, inputs)
    return (*kept[:after], tiles, *_decode(fields, load), *_prefill(fields, load), *kept[after:])


def tuning(fields: Fields, dims: ModelDims, loads: Mapping[str, Load]) -> dict[str, int]:
    """Prefill chunk length, and groups of value heads per pass of the decode update; the same in every bucket."""
    return _own_or_tuned(fields, next(iter(loads.values())))


def _own_or_tuned(fields: Fields, load: Load) -> dict[str, int]:
    groups = _groups(fields, load)
    # At least two passes: without a loop between them, the update's loads rise into the reads and registers spill.
    unroll = next((count for count in (4, 2) if groups % count == 0 and groups >= 2 * count), 1)
    own = {"chunk": chunk(load, _MAX_CHUNK), "unroll": unroll}
    return own | dict(load.tuned_tiles("gated_delta.tpu_fused", _key(fields, load)))


def _chunk(fields: Fields, load: Load) -> int:
    return _own_or_tuned(fields, load)["chunk"]


def shape_key(fields: Fields, dims: ModelDims, load: Load) -> str:
    """What tuned tiles are kept by."""
    return _key(fields, load)


def _key(fields: Fields, load: Load) -> str:
    v_heads, qk_heads, per = _v_heads(fields, load), _qk_heads(fields, load), fields.decay.per
    state, page = load.dtypes.state, load.page_size
    return tuned_key(TUNED_BY, rows=load.seqs, v_heads=v_heads, qk_heads=qk_heads, state=state, decay=per, page=page)


def kernels(tiles: Mapping[str, int], *, prefills: bool) -> dict[str, int]:
    """Launches of one layer by kernel, named up to its sizes. prefills: the bucket takes rows of several tokens."""
    return {"gdn_decode": 1, "gdn_prefill": 1} if prefills else {"gdn_decode": 1}


def temp_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Inputs before and after they are laid out, outputs, their gate and norm in float32, gates of whole lanes."""
    act = itemsize(load.dtypes.activation)
    width = _v_heads(fields, load) * fields.dv
    per_token = (
        2 * _conv_heads(fields, load) * fields.dk * act + width * (act + 2 * 4) + 2 * _gate_lanes(fields, load) * 4
    )
    if fields.decay.per == "channel":
        # Log decays before and after the softplus; those of prefill tokens with a chunk of room behind them.
        per_token += (3 if load.prefill_tokens else 2) * width * 4
    return int(load.tokens * per_token)


def refuse(fields: Fields, dims: ModelDims, load: Load) -> list[str]:
    """Why these kernels cannot serve this load; [] when they can."""
    lanes, chip = load.chip.lanes, load.chip
    if lanes != 128:
        return [f"memory rows of {lanes} values: the kernels take 128"]
    found = [
        f"{name} {dim}: the kernels take 128, a memory tile's lanes"
        for name, dim in (("head_k_dim", fields.dk), ("head_v_dim", fields.dv))
        if dim != lanes
    ]
    rows = (fields.conv_kernel - 1) * _conv_heads(fields, load)
    if rows % chip.sublanes:
        found.append(
            f"{rows} rows of {lanes} in a convolution window ({fields.conv_kernel - 1} tokens of "
            f"{_conv_heads(fields, load)} heads): the kernels take multiples of {chip.sublanes}, whole tiles; with "
            "others the compiler lays the pool out anew around the kernel"
        )
    for role in ("activation", "state", "conv"):
        dtype = getattr(load.dtypes, role)
        if dtype not in _DTYPES:
            found.append(f"{role} dtype {dtype}: the kernels take {' or '.join(_DTYPES)}")
    tiles, groups = _own_or_tuned(fields, load), _groups(fields, load)
    if tiles["unroll"] < 1 or groups % tiles["unroll"]:
        found.append(f"unroll {tiles['unroll']}: the kernel takes what divides {groups} groups")
    if tiles["chunk"] > lanes or load.page_size % tiles["chunk"]:
        found.append(f"chunk {tiles['chunk']}: the kernel takes what divides pages of {load.page_size}, up to {lanes}")
    if load.prefill_tokens and tiles["chunk"] % _CONV_STEP:
        found.append(f"page size {load.page_size}: prefill chunks are parts of a page, of {_CONV_STEP} tokens at least")
    if not found and (needed := vmem_bytes(fields, dims, load)) > chip.vmem_bytes:
        found.append(f"{needed} bytes of vector memory: the chip has {chip.vmem_bytes}")
    return found


def vmem_bytes(fields: Fields, dims: ModelDims, load: Load) -> int:
    """Scoped vector memory of the larger kernel, as they allocate it."""
    prefill = _prefill_vmem(fields, load) if load.prefill_tokens else 0
    return max(_decode_vmem(fields, load), prefill) + _SPARE_BYTES


def _v_heads(fields: Fields, load: Load) -> int:
    return fields.num_v_heads // load.degrees.tp


def _qk_heads(fields: Fields, load: Load) -> int:
    return fields.num_qk_heads // load.degrees.tp


def _conv_heads(fields: Fields, load: Load) -> int:
    """Heads that are convolved: queries, keys, values. One head is a memory row."""
    return 2 * _qk_heads(fields, load) + _v_heads(fields, load)


def _groups(fields: Fields, load: Load) -> int:
    """Value heads that share a read vector count as one."""
    return _v_heads(fields, load) if fields.decay.per == "channel" else _qk_heads(fields, load)


def _gate_lanes(fields: Fields, load: Load) -> int:
    """A token's write strengths and, of each head, log decay, in whole memory rows."""
    return ceil((1 if fields.decay.per == "channel" else 2) * _v_heads(fields, load) / 128) * 128


def _pack(fields: Fields, load: Load, size: int) -> int:
    """Value heads whose [C, C] matrices lie side by side: of one key head where they share its products."""
    by_channel = fields.decay.per == "channel"
    members = _v_heads(fields, load) if by_channel else fields.num_v_heads // fields.num_qk_heads
    return max(p for p in (1, 2, 4) if p == 1 or (p * size <= 128 and members % p == 0))


def _row_bytes(fields: Fields, load: Load) -> tuple[int, int]:
    """A row's window and state in their pools."""
    window = (fields.conv_kernel - 1) * _conv_heads(fields, load) * fields.dk * itemsize(load.dtypes.conv)
    return window, _v_heads(fields, load) * fields.dk * fields.dv * itemsize(load.dtypes.state)


def _token_bytes(fields: Fields, load: Load) -> int:
    """A token's inputs and outputs of the kernels."""
    heads = _conv_heads(fields, load) + _v_heads(fields, load)
    return heads * fields.dk * itemsize(load.dtypes.activation)


def _decode(fields: Fields, load: Load) -> tuple[Term, ...]:
    """One row at a time. The reads of the state are the matrix unit's, its update the vector unit's."""
    if not load.decode_rows:
        return ()
    (window, state), whole = _row_bytes(fields, load), load.dtypes.state == "bfloat16"
    values = _v_heads(fields, load) * fields.dk * fields.dv
    # Per value: decay, write, sum; to float32 and back, or the split into two terms that a float32 state takes.
    operations = values * (4.5 if whole else 6)
    operations += _conv_heads(fields, load) * fields.dk * (2 * fields.conv_kernel + 12)
    columns = _v_heads(fields, load) * fields.dv * (1 if whole else 2)
    traffic = 2 * (window + state) + _token_bytes(fields, load)
    if fields.decay.per == "channel":
        traffic += _v_heads(fields, load) * fields.dk * 4
    return (
        prefetched("recur", load.decode_rows * traffic),
        Gemm("recur", _TERM_ROWS, columns, fields.dk, "bfloat16", count=load.decode_rows),
        Vector("recur", load.decode_rows * operations),
    )


def _prefill(fields: Fields, load: Load) -> tuple[Term, ...]:
    """Chunk by chunk; each float32 product is one of both terms of its sides. States move once per row."""
    if not load.prefill_tokens:
        return ()
    size = _chunk(fields, load)
    chunks, dk, dv, pack = load.prefill_tokens / size, fields.dk, fields.dv, _pack(fields, load, size)
    heads, couplings = _v_heads(fields, load), _v_heads(fields, load) / pack
    doublings = max(size.bit_length() - 2, 0)
    rows = max(1.0, min(load.seqs - load.decode_rows, load.prefill_tokens))
    window, state = _row_bytes(fields, load)

    def product(m: int, n: int, k: int, count: float) -> Gemm:
        return Gemm("scan chunks", 2 * m, 2 * n, k, "bfloat16", count=count * chunks)

    # Elementwise passes over [C, C], [C, d] and [k, d] of a head, and over the convolution's channels.
    operations = size * size * (20 * doublings + 16) + size * dv * 24 + dk * dv * 10
    convolved = size * _conv_heads(fields, load) * dk * (2 * fields.conv_kernel + 12)
    traffic = load.prefill_tokens * _token_bytes(fields, load) + 2 * rows * (window + state)
    pairs: tuple[Gemm, ...] = (product(2 * size, pack * size, dk, _qk_heads(fields, load)),)  # k.k and q.k
    if fields.decay.per == "channel":
        borders = size.bit_length() - 1
        pairs = (
            product(2 * size, pack * size, pack * dk, borders * couplings),
            Gemm("scan chunks", (borders + 2) * size, dk, 3 * size, "bfloat16", count=heads * chunks),  # sums of g
            Gemm("scan chunks", dk, dv, _TERM_ROWS, "bfloat16", count=heads * chunks),  # decays down the sublanes
        )
        # Per border: e^x of a sum, keys and queries decayed and cut into terms, masked sums. Then g as terms and what
        # meets the state.
        operations += borders * (size * dk * 18 + size * size * 4) + size * dk * 24
        traffic += load.prefill_tokens * heads * dk * 4
    return (
        *pairs,
        product(size, pack * size, pack * size, 2 * doublings * couplings),  # inverse
        product(2 * size, dv, dk, heads),  # reads of the old state
        product(size, pack * dv, pack * size, 2 * couplings),  # solved writes, outputs
        product(dk, dv, size, heads),  # update of the state
        Vector("scan chunks", chunks * (heads * operations + convolved)),
        prefetched("scan chunks", traffic),
    )


def _tiles(rows: int, dtype: str) -> int:
    """Bytes of rows of 128 values in whole tiles: 8 rows of 32 bits."""
    size = itemsize(dtype)
    step = 8 * 4 // size
    return ceil(rows / step) * step * 128 * size


def _decode_vmem(fields: Fields, load: Load) -> int:
    """Two buffers for what comes in and goes out of a row; terms, columns and reads of one row; gates of all rows."""
    conv, v, act = _conv_heads(fields, load), _v_heads(fields, load), load.dtypes.activation
    by_channel, groups, dk = fields.decay.per == "channel", _groups(fields, load), fields.dk
    buffers = 2 * (_tiles(conv, act) + _tiles(v, act) + _tiles(v if by_channel else 1, "float32"))
    buffers += 4 * (_tiles((fields.conv_kernel - 1) * conv, load.dtypes.conv) + _tiles(v * dk, load.dtypes.state))
    float_rows = (conv, groups * _TERM_ROWS, groups * _TERM_ROWS if by_channel else 1, (1 + by_channel) * groups * dk)
    scratch = sum(_tiles(rows, "float32") for rows in (*float_rows, v * _TERM_ROWS, 4 * ceil(v / 8) * 8))
    taps = fields.conv_kernel * _tiles(conv, "float32")
    gates = (1 if by_channel else 2) * ceil(v / 128) * _tiles(min(load.tokens, load.seqs), "float32")
    return buffers + scratch + taps + gates


def _prefill_vmem(fields: Fields, load: Load) -> int:
    """Two buffers of a chunk's inputs, its outputs, the row's state in float32 and in its pool's dtype; one chunk's
    activations and couplings; gates of all tokens."""
    size = _chunk(fields, load)
    conv, v, act = _conv_heads(fields, load), _v_heads(fields, load), load.dtypes.activation
    window, pack, lanes = fields.conv_kernel - 1, _pack(fields, load, size), _gate_lanes(fields, load) // 128
    inputs = 2 * (window + size) * _tiles(conv, act) + _tiles(window * conv, load.dtypes.conv)
    states = _tiles(v * fields.dk, load.dtypes.state) + _tiles(v * fields.dk, "float32")
    outputs = size * _tiles(v, act)
    active = _tiles(size * ceil(conv / 8) * 8, "float32")
    gates = lanes * _tiles(load.tokens + size, "float32")
    gates += (
        _channel_vmem(fields, load) if fields.decay.per == "channel" else lanes * 3 * _tiles(max(size, 128), "float32")
    )
    couplings = 2 * (v // pack) * _tiles(2 * size, "bfloat16")
    masks = size.bit_length() * _tiles(size, "float32") + pack * _tiles(size, "bfloat16")
    return inputs + states + outputs + active + gates + couplings + masks + fields.conv_kernel * _tiles(conv, "float32")


def _channel_vmem(fields: Fields, load: Load) -> int:
    """Where each channel decays on its own: two buffers of a chunk's log decays, the same by heads, their sums' masks;
    what every head meets its state with; couplings that are not yet inverted."""
    size, v = _chunk(fields, load), _v_heads(fields, load)
    rates = 2 * size * _tiles(v, "float32") + _tiles(size * ceil(v / 8) * 8, "float32")
    spans = ceil(3 * size / 128) * _tiles((size.bit_length() + 1) * size, "bfloat16")
    strengths = _gate_lanes(fields, load) // 128 * _tiles(size, "float32")
    return (
        rates
        + spans
        + strengths
        + v * _tiles(3 * size + 8, "float32")
        + v // _pack(fields, load, size) * _tiles(size, "float32")
    )


__all__ = ["kernels", "refuse", "temp_bytes", "tuning", "vmem_bytes", "work"]
