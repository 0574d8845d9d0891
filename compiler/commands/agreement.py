"""Whether a folder's model.py is the program of its plan.json: what runs must be what was explained.

Reads the text of model.py, because importing it would import jax before the devices are chosen.
"""

import ast
from pathlib import Path
from typing import Any

from ..emit.package import plan_digest
from ..plan.plan import Plan


def disagreements(folder: Path, plan: Plan) -> list[str]:
    """Every constant of model.py that differs from plan.json, with both values."""
    try:
        found = literals((folder / "model.py").read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        return [f"model.py is no Python: {error}"]
    return [
        f"{name} is {found.get(name, 'not defined')}, plan.json gives {wanted}"
        for name, wanted in planned(plan).items()
        if found.get(name) != wanted
    ]


def planned(plan: Plan) -> dict[str, Any]:
    """Constants of model.py that the plan decides, by name."""
    buckets = {bucket.name: bucket.model_dump(exclude={"name"}) for bucket in plan.buckets}
    return {
        "PLAN_DIGEST": plan_digest(plan),
        "MESH_AXES": dict(plan.mesh.axes),
        "DATA": plan.mesh.attention_dp,
        "TENSOR": plan.mesh.attention_tp,
        "EXPERT": plan.mesh.expert_ep,
        "NUM_RANKS": plan.mesh.dp,
        "ACTIVATION": plan.dtypes.activation,
        "MATMUL_PRECISION": plan.matmul_precision,
        "PAGE_SIZE": plan.page_size,
        "MAX_CONTEXT": plan.max_context,
        "NUM_PAGES": plan.pages_per_rank,
        "NUM_SLOTS": plan.slots_per_rank,
        "BUCKETS": buckets,
        "COMPILE_OPTIONS": plan.compile_options,
        **({"DEVICE": plan.device} if plan.device else {}),
        **_tuning(plan.tuning),
    }


def _tuning(tuning: dict[str, int]) -> dict[str, Any]:
    """gdn.chunk -> GDN_CHUNK; moe.block_rows.decode -> an entry of MOE_BLOCK_ROWS, its value where buckets agree."""
    found: dict[str, Any] = {}
    for key, value in tuning.items():
        block, name, *bucket = key.split(".")
        constant = f"{block}_{name}".upper()
        if bucket:
            found.setdefault(constant, {})[bucket[0]] = value
        else:
            found[constant] = value
    same = {name: one for name, one in found.items() if isinstance(one, dict) and len(set(one.values())) == 1}
    return found | {name: next(iter(one.values())) for name, one in same.items()}


def literals(source: str) -> dict[str, Any]:
    """The module's constants that are written out; a Bucket(...) is a dict of its arguments."""
    found = {}
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                try:
                    found[name] = _value(value)
                except ValueError:  # computed when the module is imported
                    continue
    return found


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Dict(keys=keys, values=values):
            return {ast.literal_eval(key): _value(value) for key, value in zip(keys, values, strict=True) if key}
        case ast.Call(func=ast.Name(id="Bucket"), args=[], keywords=keywords):
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
        case _:
            return ast.literal_eval(node)
