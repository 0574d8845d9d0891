"""Dumb rendering: jinja2 places the view's text; the result must parse."""

import ast
from pathlib import Path

import jinja2

TEMPLATES = Path(__file__).parent / "templates"


def environment() -> jinja2.Environment:
    """Strict environment over the program templates and the blocks' call.j2."""
    import moec.blocks

    loader = jinja2.FileSystemLoader([TEMPLATES, Path(moec.blocks.__file__).parent])
    return jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(template: str, **fields: object) -> str:
    """One template with the fields it places."""
    return environment().get_template(template).render(**fields)


def render_python(template: str, **fields: object) -> str:
    """As render, and the text must be valid Python."""
    text = render(template, **fields)
    ast.parse(text)
    return text
