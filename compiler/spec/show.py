"""The composed input as text: `moec show spec`."""

import json
from typing import Any

import yaml

from .schema import Request


def spec_document(request: Request) -> dict[str, Any]:
    """The checked roots as plain data: what was given, defaults filled in, interpolations resolved."""
    roots = {
        "model": request.model,
        "target": request.target,
        "workload": request.workload,
        "plan": request.pins,
    }
    return {name: _given(root.model_dump(mode="json")) for name, root in roots.items() if root is not None}


def _given(value: Any) -> Any:
    """Without nulls and empty mappings: they say what their absence says."""
    if isinstance(value, dict):
        kept = {key: _given(one) for key, one in value.items()}
        return {key: one for key, one in kept.items() if one is not None and one != {}}
    return [_given(one) for one in value] if isinstance(value, list) else value


def show_spec(request: Request, *, as_json: bool = False) -> str:
    """The composed document as YAML (loads again, root by root) or JSON."""
    document = spec_document(request)
    if as_json:
        return json.dumps(document, indent=2)
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
