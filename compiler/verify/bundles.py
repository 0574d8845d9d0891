"""Reads libtpu's final bundles: the control tree of a kernel, what its nodes hold, and what one call executes.

A dump (`--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*`)
has one file per module: a straight list of VLIW bundles. A loop goes from a bundle labelled LB to the branch that
leads back there; a conditional region is what a forward branch may jump over. Counts are issue slots, not time.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ENDING = "-final_bundles.txt"
_BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(LB|LH|LE|PB|PF|CT)?\s*:\s*>*\s*\{", re.M)
_STARTS = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel\s*(?:\((!?)%(\w+)\))?\s*target = \$region(\d+)")
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_GRANULES = re.compile(r"/\*size_in_granules=\*/%?(\w+)")
# A definition that is predicated defines all the same: its region is not entered otherwise.
_DEFINE = re.compile(r"%(\w+) = ([\w.]+)\s+(?:\(!?%\w+\),\s*)?([^;}]*)")
_FILE = re.compile(rf"^\d+-(.+?)-\d+{re.escape(ENDING)}$")
_OPS = {"vmatmul": re.compile(r"\bvmatmul"), "pushes": re.compile(r"\bvmat(?:push|prep)")}
_DMA = re.compile(r"\bdma\.(?!done)(\w+)")
_DELAY = 6  # bundles behind a branch that still run; a single empty bundle stands for unfilled ones
_INVERSE = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
_GRANULE_BYTES, _SMEM_GRANULE_BYTES = 32, 4


@dataclass(frozen=True)
class Counts:
    """Issue slots, or how often they execute. spills: bundles that move a spilled register.

    dmas: transfers started; bytes: of those with a constant size, by direction ("hbm_to_vmem"); unsized: the others.
    """

    bundles: float = 0
    spills: float = 0
    vmatmul: float = 0
    pushes: float = 0
    dmas: float = 0
    unsized: float = 0
    bytes: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: "Counts") -> "Counts":
        keys = self.bytes.keys() | other.bytes.keys()
        moved = {key: self.bytes.get(key, 0) + other.bytes.get(key, 0) for key in sorted(keys)}
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in _NUMBERS}, bytes=moved)

    def __mul__(self, times: float) -> "Counts":
        moved = {key: value * times for key, value in self.bytes.items()}
        return Counts(**{name: getattr(self, name) * times for name in _NUMBERS}, bytes=moved)


_NUMBERS = ("bundles", "spills", "vmatmul", "pushes", "dmas", "unsized")


@dataclass(frozen=True)
class Node:
    """A stretch of bundles. path: "" = the module, then "L0.I1": L a loop, I a conditional region.

    own: counts outside the children. trips: passes per entry, None where a loop's bound is dynamic;
    1 for a region, because it may run each time.
    """

    path: str
    first: int
    last: int
    own: Counts
    trips: float | None
    children: tuple["Node", ...] = ()

    def walk(self) -> Iterable["Node"]:
        """This node and all below, in textual order."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Executed:
    """What one call executes. unknown: paths of dynamic loops that were counted once for want of a number."""

    counts: Counts
    unknown: tuple[str, ...] = ()


# Kind, first bundle, last bundle, passes.
_Span = tuple[str, int, int, float | None]


@dataclass(frozen=True)
class _Bundle:
    label: str
    text: str
    code: str  # text without comments, but for sizes of transfers


def modules(dump: Path) -> list[tuple[str, Path]]:
    """(module name, file) of every program in a dump, in the order of compilation."""
    files = sorted(dump.glob(f"*{ENDING}"))
    named = [(match.group(1), file) for file in files if (match := _FILE.match(file.name))]
    return [(name, file) for name, file in named if "schedule-analysis" not in file.name]


def parse(text: str) -> Node:
    """The control tree of one final_bundles file."""
    bundles = _split(text)
    values = {m.group(1): (m.group(2), m.group(3)) for b in bundles for m in _DEFINE.finditer(b.code)}
    spans = [*_loops(bundles, values), *_regions(bundles)]
    own = [_count(bundle, values) for bundle in bundles]
    root = Node(path="", first=0, last=len(bundles) - 1, own=Counts(), trips=1)
    # Outer spans first; of a loop and the guard around it, which may cover the same bundles, the guard.
    return _nest(root, sorted(spans, key=lambda span: (span[1], -span[2], span[0])), own)


def executed(node: Node, trips: Mapping[str, float]) -> Executed:
    """Counts of one pass through the module.

    trips: by path, passes of a loop, or the share that runs a region; "*": passes of every other dynamic loop.
    """
    total = node.own
    unknown: tuple[str, ...] = ()
    for child in node.children:
        times = trips.get(child.path, trips.get("*") if child.trips is None else child.trips)
        if times == 0:
            continue
        inner = executed(child, trips)
        if times is None:
            unknown += (child.path,)
        total, unknown = total + inner.counts * (1 if times is None else times), unknown + inner.unknown
    return Executed(total, unknown)


def static(node: Node) -> Counts:
    """Counts of the module's text: everything once."""
    total = Counts()
    for part in node.walk():
        total = total + part.own
    return total


def _split(text: str) -> list[_Bundle]:
    heads = list(_BUNDLE.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    found: list[_Bundle] = []
    for head, end in zip(heads, ends, strict=True):
        body = text[head.end() : end]
        code = _COMMENT.sub(lambda m: m.group() if "size_in_granules" in m.group() else "", body)
        found.append(_Bundle(head.group(1) or "", body, code))
    return found


def _loops(bundles: list[_Bundle], values: Mapping[str, tuple[str, str]]) -> list[_Span]:
    """("L", first, last, trips) of each loop: from its LB to the last branch back there."""
    back: dict[str, tuple[int, re.Match[str]]] = {}
    for i, bundle in enumerate(bundles):
        back |= {branch.group(3): (i, branch) for branch in _BRANCH.finditer(bundle.code)}
    found: list[_Span] = []
    for first, bundle in enumerate(bundles):
        if bundle.label != "LB":
            continue
        ends = [back[region] for region in _STARTS.findall(bundle.text) if region in back and back[region][0] >= first]
        assert ends, f"no branch leads back to the loop at bundle {first}"
        at, branch = max(ends, key=lambda end: end[0])
        found.append(("L", first, at + _delay(bundles, at), _trips(branch, values)))
    return found


def _delay(bundles: list[_Bundle], branch: int) -> int:
    """Bundles behind a branch that run although it is taken."""
    unfilled = branch + 1 < len(bundles) and not bundles[branch + 1].code.strip("} \n")
    return 1 if unfilled else min(_DELAY, len(bundles) - 1 - branch)


def _trips(back: re.Match[str], values: Mapping[str, tuple[str, str]]) -> float | None:
    """Passes of a counting loop whose start, step and bound are constants; the loop goes back while a test holds."""
    negated, name = back.group(1), back.group(2) or ""
    op, arguments = values.get(name, ("", ""))
    if not op.startswith("scmp."):
        return None
    compared = op.split(".")[1]
    stops = compared if negated else _INVERSE[compared]
    left, _, right = (part.strip() for part in arguments.partition(","))
    counter, bound = left.lstrip("%"), _constant(right, values)
    before = values.get(counter, ("",))[0] == "sphi"  # the test sees the variable before its step
    phi = counter if before else _phi_of(counter, values)
    start, step = _start_and_step(phi, "" if before else counter, values) if phi else (None, None)
    if bound is None or start is None or not step or stops not in ("eq", *(("ge", "gt") if step > 0 else ("le", "lt"))):
        return None
    distance = (bound - start if step > 0 else start - bound) + (stops in ("gt", "lt"))
    return float(max(1, -(-distance // abs(step)) + before))


def _phi_of(counter: str, values: Mapping[str, tuple[str, str]]) -> str | None:
    """The loop variable that `counter` = variable + constant comes from."""
    op, arguments = values.get(counter, ("", ""))
    if not op.startswith("sadd"):
        return None
    names = [name for name in re.findall(r"%(\w+)", arguments) if values.get(name, ("",))[0] == "sphi"]
    return names[0] if len(names) == 1 else None


def _start_and_step(phi: str, counter: str, values: Mapping[str, tuple[str, str]]) -> tuple[int | None, int | None]:
    initial, _, following = (part.strip() for part in values[phi][1].partition(","))
    advanced = counter or _copied(following.lstrip("%"), values)
    step = next(
        (c for part in values.get(advanced, ("", ""))[1].split(",") if (c := _constant(part, values)) is not None), None
    )
    return _constant(initial, values), step


def _copied(name: str, values: Mapping[str, tuple[str, str]]) -> str:
    """Follows register copies to the value itself."""
    while values.get(name, ("",))[0].startswith("smov") and values[name][1].strip().startswith("%"):
        name = values[name][1].strip().lstrip("%")
    return name


def _constant(operand: str, values: Mapping[str, tuple[str, str]]) -> int | None:
    """A literal, or a register that was set to one; as a signed 32-bit number."""
    word = operand.strip()
    if word.startswith("%"):
        op, arguments = values.get(_copied(word[1:], values), ("", ""))
        word = arguments.strip() if op.startswith("smov") else ""
    if not re.fullmatch(r"-?\d+", word):
        return None
    number = int(word)
    return number - 2**32 if number >= 2**31 else number


def _regions(bundles: list[_Bundle]) -> list[_Span]:
    """("I", first, last, 1) of what each forward branch jumps over."""
    starts = {number: i for i, bundle in enumerate(bundles) for number in _STARTS.findall(bundle.text)}
    found: list[_Span] = []
    for i, bundle in enumerate(bundles):
        for branch in _BRANCH.finditer(bundle.code):
            target = starts.get(branch.group(3), -1)
            first = i + 1 + _delay(bundles, i)
            if first < target:
                found.append(("I", first, target - 1, 1.0))
    return found


def _nest(node: Node, spans: list[_Span], own: list[Counts]) -> Node:
    """The node with the spans inside it as children; a span that sticks out is cut at the border."""
    children: list[Node] = []
    at, covered, i = node.first, [], 0
    while i < len(spans):
        kind, first, last, trips = spans[i]
        first, last = max(first, at), min(last, node.last)
        inside = [span for span in spans[i + 1 :] if span[1] <= last]
        number = sum(child.path.rsplit(".", 1)[-1].startswith(kind) for child in children)
        path = f"{node.path}.{kind}{number}".lstrip(".")
        if first <= last:
            children.append(_nest(Node(path, first, last, Counts(), trips), inside, own))
            covered.append((first, last))
            at = last + 1
        i += 1 + len(inside)
    return replace(node, own=_outside(node, covered, own), children=tuple(children))


def _outside(node: Node, covered: list[tuple[int, int]], own: list[Counts]) -> Counts:
    total, at = Counts(), node.first
    for first, last in [*covered, (node.last + 1, node.last)]:
        for counts in own[at:first]:
            total = total + counts
        at = last + 1
    return total


def _count(bundle: _Bundle, values: Mapping[str, tuple[str, str]]) -> Counts:
    """What one bundle holds."""
    code = bundle.code
    moved: dict[str, float] = {}
    unsized = 0
    dmas = list(_DMA.finditer(code)) if "dma." in code else []
    for dma in dmas:
        size = _GRANULES.search(code, dma.end())
        granules = (
            _constant(size.group(1) if size.group(1).isdigit() else f"%{size.group(1)}", values) if size else None
        )
        unsized += granules is None
        unit = _SMEM_GRANULE_BYTES if "smem" in dma.group(1) else _GRANULE_BYTES
        moved[dma.group(1)] = moved.get(dma.group(1), 0) + (granules or 0) * unit
    ops = {name: len(pattern.findall(code)) for name, pattern in _OPS.items()} if "vmat" in code else {}
    return Counts(bundles=1, spills=float("_spill]" in code), dmas=len(dmas), unsized=unsized, bytes=moved, **ops)


__all__ = ["Counts", "Executed", "Node", "executed", "modules", "parse", "static"]
