"""What a block's folder may hold: one declaration that a spec names, and a template that decides nothing."""

import ast


def test_only_fields_are_block_fields(python_files: dict[str, str]) -> None:
    """`like` of BlockFields names a block: on a mapping inside a block it would be accepted and ignored."""
    found = {
        (path, node.name)
        for path, text in python_files.items()
        if path.startswith("blocks/")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and "BlockFields" in {ast.unparse(base).split(".")[-1] for base in node.bases}
    }
    assert found
    assert not {(path, name) for path, name in found if name != "Fields" or not path.endswith("/block.py")}


def test_templates_of_blocks_decide_nothing(text_files: dict[str, str]) -> None:
    templates = {path: text for path, text in text_files.items() if path.startswith("blocks/") and path.endswith(".j2")}
    assert templates
    assert not [path for path, text in templates.items() if "{% if" in text or "{%- if" in text or " if " in text]
