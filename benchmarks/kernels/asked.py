"""What is wrong with a command line, all of it in one pass."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

from moec.compiler.problems import Problem
from moec.compiler.spec.files import COMMAND_LINE
from moec.compiler.spec.suggest import closest
from moec.targets.target import load_target, parse_name, read_topologies, target_names

from .case import Case
from .measure import find_cases

# Variants of peers' cases: the checkout below --peers that has them, and a folder of it (peers/stubs.py).
CHECKOUTS = {"tpu-inference": "tpu_inference", "tokamax": "tokamax"}


def canonical(name: str) -> str:
    """The one name of a target that may be written in several ways; raises ValueError for none."""
    chip, topology = parse_name(name)
    return read_topologies(chip)[topology]["name"]


def problems_of(args: argparse.Namespace, found: Mapping[str, tuple[str, Case]]) -> list[Problem]:
    """found: the cases that were asked for and exist."""
    problems = _of_target(args.target)
    every = [*find_cases("cases"), *find_cases("peers")]
    unknown = [name for name in args.case or () if name not in found]
    problems += [_problem("--case", f"no case '{name}'", closest(name, every)) for name in dict.fromkeys(unknown)]
    limit = args.timeout
    if not isinstance(limit, float) or not 0 < limit < math.inf:
        shown = f"'{limit}'" if isinstance(limit, str) else f"{limit:g}"
        problems.append(_problem("--timeout", f"expected seconds, got {shown}", "valid: a number above 0"))
    problems += _of_peers(args.peers, found if args.case else {})
    if args.reread and not args.reread.is_dir():
        problems.append(_problem("--reread", f"there is no folder '{args.reread}'", "what --keep-dumps DIR left"))
    if args.keep_dumps and args.keep_dumps.exists() and not args.keep_dumps.is_dir():
        problems.append(_problem("--keep-dumps", f"'{args.keep_dumps}' is a file", "name a folder"))
    return problems


def _problem(option: str, text: str, hint: str) -> Problem:
    return Problem(option, text, hint, COMMAND_LINE)


def _of_target(name: str) -> list[Problem]:
    tpus = [one for one in target_names() if load_target(one).platform == "tpu"]
    try:
        target = canonical(name)
    except ValueError as error:
        near = closest(name, tpus)
        return [_problem("--target", str(error), near if near.startswith("did you mean") else "")]
    if target in tpus:
        return []
    return [_problem("--target", f"'{name}' is no TPU: kernels are compiled for TPUs", "e.g. tpu7x:2x2x1")]


def _of_peers(folder: Path | None, named: Mapping[str, tuple[str, Case]]) -> list[Problem]:
    """The checkouts that named cases are loaded from; without names, any of them will do."""
    needed = {name: case.variant for name, (_, case) in named.items() if case.variant in CHECKOUTS}
    if folder is None:
        text = "is a peer's, and its kernel is in no checkout that was named"
        return [_problem("--case", f"'{name}' {text}", f"--peers DIR with DIR/{peer}") for name, peer in needed.items()]
    if not folder.is_dir():
        return [_problem("--peers", f"there is no folder '{folder}'", "the folder above the peers' checkouts")]
    there = [peer for peer, package in CHECKOUTS.items() if (folder / peer / package).is_dir()]
    if not named and not there:
        checkouts = " or ".join(f"{peer}/{package}" for peer, package in CHECKOUTS.items())
        return [_problem("--peers", f"no checkout below '{folder}'", f"expected {checkouts}")]
    return [
        _problem("--peers", f"no checkout of {peer} below '{folder}', which '{name}' is from",
                 f"expected {peer}/{CHECKOUTS[peer]}")
        for name, peer in needed.items() if peer not in there
    ]  # fmt: skip
