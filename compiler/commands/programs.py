"""From what the user named to an emitted program: a folder as it is, or a model emitted into the cache."""

import sys
from dataclasses import dataclass
from pathlib import Path

from ..emit.emit import emit, program_dir
from ..plan.choose import make_plan
from ..plan.plan import Plan
from ..spec.files import list_models
from ..spec.load import load
from ..spec.schema import Request
from .common import fail, log, one_name, program_folder, use_cpu_devices

CACHE = Path(".moec_cache")  # like the caches of other developer tools, in the working directory
DEFAULT_WORKLOAD = "default"


@dataclass(frozen=True)
class Emitted:
    """An emitted program and its plan. request: known when it was emitted just now."""

    folder: Path
    plan: Plan
    request: Request | None


def find_program(words: list[str], target: str | None, workload: str | None, *, extra: tuple[str, ...] = ()) -> Emitted:
    """The program of `MODEL|DIR [key=value ...]`; extra: overrides that the user's own come after."""
    name, overrides = one_name(words, "MODEL or DIR")
    folder = program_folder(name)
    if folder is None:
        return emit_cached(load_request(name, target or visible_target(), workload, (*extra, *overrides)))
    if target or workload or overrides:
        fail(
            f"{folder} is an emitted program: its target, workload and plan are fixed", "name the MODEL to change them"
        )
    return Emitted(folder, read_plan(folder), None)


def load_request(model: str, target: str | None, workload: str | None, overrides: tuple[str, ...]) -> Request:
    """The request; a workload that nobody named is the default one."""
    return load(model, target=target, workload=workload or DEFAULT_WORKLOAD, overrides=overrides)


def emit_cached(request: Request) -> Emitted:
    """Plan and emit into the cache."""
    plan = make_plan(request)
    folder = program_dir(CACHE / "programs", plan)
    emit(request.graph, plan, folder)
    log(f"compiled {plan.model} for {plan.target}, workload {plan.workload}: {folder}")
    return Emitted(folder, plan, request)


def read_plan(folder: Path) -> Plan:
    """The plan of an emitted program."""
    return Plan.model_validate_json((folder / "plan.json").read_bytes())


def same_request(plan: Plan) -> Request:
    """The request a plan was made from."""
    return load(model_named(plan.model), target=plan.target, workload=plan.workload, overrides=plan.overrides)


def model_named(name: str) -> str:
    """The shipped model a plan's model name stands for: plans hold the spec's own name, files may lie deeper."""
    shipped = list_models()
    found = [model for model in shipped if model.replace("/", "_") == name.replace("/", "_")]
    return found[0] if found and name not in shipped else name


def prepare_devices(plan: Plan) -> None:
    """As many virtual CPU devices as a CPU program needs, unless jax already chose the visible devices."""
    if is_cpu(plan) and "jax" not in sys.modules:
        use_cpu_devices(plan.mesh.num_devices)


def take_devices(plan: Plan) -> list:
    """The devices the program runs on; a machine without them is bad input."""
    import jax

    devices = jax.devices()
    if is_cpu(plan) != (devices[0].platform == "cpu") or len(devices) < plan.mesh.num_devices:
        seen = f"{len(devices)} x {devices[0].device_kind}"
        fail(f"the program is for {plan.target} ({plan.mesh.num_devices} devices), this machine has {seen}")
    return devices[: plan.mesh.num_devices]


def visible_target() -> str:
    """The target that the visible devices are; chips must be named, because their topology cannot be seen."""
    import jax

    devices = jax.devices()
    if devices[0].platform != "cpu":
        fail(f"found {len(devices)} x {devices[0].device_kind}", "name their topology with --target")
    return "cpu" if len(devices) == 1 else f"cpu:{len(devices)}"


def is_cpu(plan: Plan) -> bool:
    return plan.target.partition(":")[0] == "cpu"
