"""From what the user named to an emitted program: a folder as it is, or a model emitted into the cache."""

import os
import sys
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from moec.targets.target import load_target

from ..emit.emit import check, emit, why_not_ours
from ..emit.package import plan_digest, program_dir
from ..plan.choose import make_plan
from ..plan.plan import Plan
from ..spec.load import load
from ..spec.schema import Request
from .agreement import disagreements
from .common import fail, log, one_name, program_folder, use_cpu_devices
from .plan_file import read_plan, recorded_in

CACHE = Path(".moec_cache")  # like the caches of other developer tools, in the working directory
TPU_NODES = ("/dev/accel*", "/dev/vfio/[0-9]*")  # device files of TPU chips on Linux
DEFAULT_WORKLOAD = "default"
DEFAULT_CONTEXT = 128  # positions per sequence of that workload


@dataclass(frozen=True)
class Emitted:
    """An emitted program and its plan. request: known when it was emitted just now."""

    folder: Path
    plan: Plan
    request: Request | None


def find_program(words: list[str], target: str | None, workload: str | None, *, positions: int = 0) -> Emitted:
    """The program of `MODEL|DIR [key=value ...]`.

    positions: what a sequence will need; the default workload grows to it.
    """
    name, overrides = one_name(words, "MODEL or DIR")
    folder = program_folder(name)
    if folder is None:
        target = target or visible_target()
        request = load_request(name, target, workload, overrides)
        extra = () if workload else context_override(overrides, positions, request.model.max_context)
        return emit_cached(load_request(name, target, workload, (*overrides, *extra)) if extra else request)
    plan = read_plan(folder)
    if workload or overrides or (target and not _names_target(target, plan)):
        fail(f"{folder} is an emitted program for {plan.target}, its plan is fixed", "name the MODEL to change it")
    if found := disagreements(folder, plan):
        fail(f"{folder}: model.py is not the program of its plan.json: {'; '.join(found)}", "compile it again")
    return Emitted(folder, plan, None)


def context_override(overrides: tuple[str, ...], positions: int, most: int) -> tuple[str, ...]:
    """max_context as the next power of two, so that not every prompt length is another program.

    most: what the model takes; longer prompts are refused by the program.
    """
    if positions <= DEFAULT_CONTEXT or any(word.startswith("workload.max_context=") for word in overrides):
        return ()
    return (f"workload.max_context={min(1 << (positions - 1).bit_length(), most)}",)


def _names_target(target: str, plan: Plan) -> bool:
    try:
        return load_target(target).name == plan.target
    except ValueError:
        return False


def load_request(model: str, target: str | None, workload: str | None, overrides: tuple[str, ...]) -> Request:
    """The request; a workload that nobody named is the default one."""
    return load(model, target=target, workload=workload or DEFAULT_WORKLOAD, overrides=overrides)


def emit_cached(request: Request) -> Emitted:
    """Plan and emit into the cache."""
    plan = make_plan(request)
    # The digest keeps programs of other overrides apart: another process may be running one of them.
    named = program_dir(CACHE / "programs", plan)
    folder = named.with_name(f"{named.name}_{plan_digest(plan)}")
    if check(request.graph, plan, folder):
        write_program(request, plan, folder)
    log(f"compiled {plan.model} for {plan.target}, workload {plan.workload}: {folder}")
    return Emitted(folder, plan, request)


def write_program(request: Request, plan: Plan, folder: Path, *, standalone: bool = False) -> list[Path]:
    """Emit into a folder that is absent, empty or an older program of the same model."""
    try:
        if reason := why_not_ours(folder, plan):
            fail(f"{folder} {reason}", "name an empty or absent folder with -o DIR")
        return emit(request.graph, plan, folder, standalone=standalone)
    except OSError as error:
        file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
        why = f"{file} is a file" if file else error.strerror or error
        fail(f"cannot write {folder}: {why}", "name a folder that can be written with -o DIR")


def same_request(plan: Plan, folder: Path) -> Request:
    """The request the plan of a folder was made from."""
    with recorded_in(folder):
        return load(plan.model_source, target=plan.target, workload=plan.workload_source, overrides=plan.overrides)


def prepare_devices(plan: Plan) -> None:
    """As many virtual CPU devices as a CPU program needs, unless jax already chose the visible devices."""
    if is_cpu(plan) and "jax" not in sys.modules:
        use_cpu_devices(plan.mesh.num_devices)


def virtual_devices(count: int) -> list[Any]:
    """`count` virtual CPU devices, made now unless jax was imported before."""
    if "jax" not in sys.modules:
        use_cpu_devices(count)
    import jax

    return jax.devices("cpu")[:count]


def take_devices(plan: Plan) -> list[Any]:
    """The devices the program runs on; a machine without them is bad input."""
    import jax

    devices = jax.devices()
    if is_cpu(plan) != (devices[0].platform == "cpu") or len(devices) < plan.mesh.num_devices:
        seen = f"{len(devices)} x {devices[0].device_kind}"
        fail(f"the program is for {plan.target} ({plan.mesh.num_devices} devices), this machine has {seen}")
    return devices[: plan.mesh.num_devices]


def visible_target() -> str:
    """The target that the visible devices are; chips must be named, because their topology cannot be seen."""
    if not any(glob(nodes) for nodes in TPU_NODES):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # libtpu would search the network for a TPU
    import jax

    devices = jax.devices()
    if devices[0].platform != "cpu":
        fail(f"found {len(devices)} x {devices[0].device_kind}", "name their topology with --target")
    return "cpu" if len(devices) == 1 else f"cpu:{len(devices)}"


def is_cpu(plan: Plan) -> bool:
    return plan.target.partition(":")[0] == "cpu"
