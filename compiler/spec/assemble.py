"""The resolved document to a Request: types, relations, graph and pins, all findings together."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moec.targets.target import Target

from ..graph.build import build
from ..graph.ir import Graph
from ..graph.verify import check_table, verify_graph
from .pins import check_variant_pins
from .schema import PlanPins, Request, Workload
from .semantics import check_model, check_pins, check_workload, merge_pins
from .validate import Finding, Parsed, parse, parse_model


@dataclass
class _Found:
    """What has been made of the document so far."""

    findings: list[Finding] = field(default_factory=list)

    def keep(self, result: tuple[Any, list[Finding]]) -> Any:
        value, findings = result
        self.findings += findings
        return value


def assemble(
    document: Mapping[str, Any], usable: set[str], overrides: Sequence[str]
) -> tuple[Request | None, list[Finding]]:
    """The request, or None and why; roots that are not usable were reported or not asked for."""
    found = _Found()
    parsed = parse_model(document["model"]) if "model" in usable else Parsed(None, frozenset(), ())
    found.findings += parsed.findings + check_model(parsed)
    spec = parsed.spec
    graph = found.keep(_graph(parsed, found.findings))
    workload = found.keep(parse(Workload, document["workload"], ("workload",))) if "workload" in usable else None
    plan = found.keep(parse(PlanPins, document["plan"], ("plan",)))
    target = found.keep(parse(Target, document["target"], ("target",))) if "target" in usable else None
    if workload:
        limit = spec.max_context if spec and "max_context" not in parsed.poisoned else None
        found.findings += check_workload(workload, limit)
    pins, origin = merge_pins(spec, plan or PlanPins())
    found.findings += check_pins(pins, origin, graph, target.topology.num_devices if target else None)
    platform = document["target"].get("platform") if "target" in usable else None
    known = platform if platform in ("cpu", "tpu") else None
    found.findings += check_variant_pins(document["plan"].get("variants"), graph, known)
    if found.findings or spec is None or graph is None:
        return None, found.findings
    broken = verify_graph(graph)
    assert not broken, broken
    return Request(spec, graph, target, workload, pins, tuple(overrides), _digests(document, usable, overrides)), []


def _graph(parsed: Parsed, findings: list[Finding]) -> tuple[Graph | None, list[Finding]]:
    """The graph and what is wrong with the checkpoint table, when layers and blocks are sound enough."""
    spec = parsed.spec
    if spec is None or {"layers", "blocks", "checkpoint"} & parsed.poisoned or set(parsed.declared) - set(spec.blocks):
        return None, []
    if any(one.path[:2] == ("model", "layers") for one in findings):
        return None, []
    # A block with a field left out has other weights than its author meant.
    if any(one.path[:2] == ("model", "blocks") and not one.at_key for one in parsed.findings):
        return None, []
    graph = build(spec)
    unused = set(spec.blocks) - {inst.base for inst in graph.blocks().values()}
    return graph, check_table(spec.checkpoint, graph, unused) if spec.checkpoint else []


def _digests(document: Mapping[str, Any], usable: set[str], overrides: Sequence[str]) -> dict[str, str]:
    """sha256 of each root as composed; order counts, because alternatives in a table are tried in order."""
    parts = {"spec": "model", "target": "target", "workload": "workload"}
    found = {name: _sha256(document[root]) for name, root in parts.items() if root in usable}
    return {**found, "overrides": _sha256(list(overrides))}


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, separators=(",", ":")).encode()).hexdigest()
