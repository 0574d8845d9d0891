"""A Hugging Face config.json as a commented spec: what its family's recipe makes of it, checked like any spec."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moec.blocks.registry import BLOCKS

from ..graph.ir import Graph
from ..problems import Problem, ProblemsError
from ..spec.assemble import assemble
from ..spec.marks import dotted
from ..spec.schema import ModelSpec
from ..spec.validate import Finding
from .arrange import block_names, groups, layer_entries, renamed
from .config import At, Config, Seen, shown
from .fill import Filler, Tree, on_top, plain, reads
from .leftovers import UNKNOWN, Leftover, comment, leftovers
from .recipes import DRAFT, Recipe, changes_of, load_recipe, merge_recipe, recipe_of
from .scope import Scope, Value
from .table import Stored, choose_lines, questions_about, unnamed
from .text import Style, render
from .trim import trim
from .types import wrong_types

SECTIONS = (
    ("spec_version", "name", "hidden_size", "vocab_size", "max_context", "num_layers"),
    ("embed", "defaults"),
    ("blocks",),
    ("layers",),
    ("final_norm", "head"),
    ("checkpoint",),
)


@dataclass(frozen=True)
class Ported:
    """What became of a config.json.

    text: the spec. graph: what it says, None while a draft says nothing sound. recipe: its name; draft: there
    is none for this model_type. leftovers: fields that nothing in the spec comes from. questions: what the
    reader has to answer, by spec path; asked: the stored tensors that some are about. inexpressible: what a draft
    leaves out because it cannot be said.
    """

    text: str
    graph: Graph | None
    recipe: str
    draft: bool
    leftovers: tuple[Leftover, ...]
    questions: Mapping[str, Sequence[str]]
    asked: tuple[str, ...] = ()
    inexpressible: tuple[Problem, ...] = ()
    model_type: Any = None

    @property
    def unknown(self) -> tuple[Leftover, ...]:
        """Fields that nothing was made of, for no reason that the recipe knows."""
        return tuple(one for one in self.leftovers if one.reason == UNKNOWN)

    @property
    def open(self) -> bool:
        """Whether something is left for the reader to settle."""
        return bool(self.inexpressible or self.unknown or any(self.questions.values()))


@dataclass
class _Port:
    """One config with its recipe, and what has been made of it. unread: config path -> the unused block it is for."""

    config: Config
    recipe: Recipe
    filler: Filler
    scope: Scope
    unread: dict[str, str]

    @property
    def draft(self) -> bool:
        return self.recipe.name == DRAFT

    def fill(self, part: str) -> Any:
        """A part of the recipe with its expressions computed."""
        return self.filler.fill(self.recipe.part(part), self.scope, () if part == "spec" else (part,))


def port(config: Config, name: str, stored: Stored | None = None) -> Ported:
    """The spec called `name`; raises ProblemsError with everything that keeps it from being one.

    stored: shapes of the tensors of a checkpoint; the table then has just the lines that it needs.
    """
    work = _begin(config, stored)
    config, cannot = work.config, inexpressible(work)
    _refuse([] if work.draft else cannot)
    spec, table = _filled(work, name)
    problems = work.filler.problems(config.file) + wrong_types(config, work.recipe.part("types"))
    graph, findings = _assembled(spec) if spec["layers"] else (None, [])
    problems += _located(findings, spec, work)
    _refuse(problems if work.filler.missing or not spec["layers"] or not work.draft else [])
    questions, asked = _questions(work, spec), list[str]()
    if graph is not None:
        spec["checkpoint"] = choose_lines(table, graph, stored)
        if work.draft and stored is not None:
            asked = unnamed(spec["checkpoint"], stored)
            questions.setdefault("checkpoint", []).extend(questions_about(asked, stored))
        whole, findings = _assembled(spec)
        if whole is None and stored is not None and not work.draft:  # the checkpoint lacks what the model needs
            spec["checkpoint"] = choose_lines(table, graph, None)
            whole, findings = _assembled(spec)
        graph = whole
        problems += _located(findings, spec, work)
        _refuse([] if work.draft else problems)
    for problem in dict.fromkeys(problems):
        questions.setdefault("", []).append(f"{problem.path}: {problem.text}")
    left = leftovers(config, work.recipe.part("ignored"), work.unread)
    text, kind = _text(work, spec, left, questions, cannot), config.data.get("model_type")
    return Ported(text, graph, work.recipe.name, work.draft, left, questions, tuple(asked), tuple(cannot), kind)


def _refuse(problems: Sequence[Problem]) -> None:
    if problems:
        raise ProblemsError(dict.fromkeys(problems))


def _filled(work: _Port, name: str) -> tuple[dict[str, Tree], Tree]:
    """The spec without its checkpoint table, and the whole table of the recipe."""
    entries, source = layer_entries(work.recipe.part("layers"), work.filler, work.scope)
    spec: dict[str, Tree] = {"spec_version": Value(1), "name": Value(name), **work.fill("spec")}
    blocks, entries = _blocks(work, entries)
    spec |= {"num_layers": Value(len(entries), source), "blocks": blocks, "layers": groups(entries)}
    return trim(spec, ModelSpec), work.fill("checkpoint")


def _begin(config: Config, stored: Stored | None) -> _Port:
    """Choose the recipe: by the file's model_type, else by that of a part that a recipe calls its root, else a draft's.

    The record of what is read is a fresh one: a config can be ported again.
    """
    recipe = next(_recipes(config), None) or load_recipe(DRAFT)
    root = _root(config, recipe)
    seen = Seen(nulls={"model_type": None})  # used, here
    config = replace(config, root=root, defaults=recipe.part("defaults"), seen=seen)
    return _Port(config, recipe, Filler(recipe.part("templates")), Scope(config, recipe.part("let"), {}, stored), {})


def _root(config: Config, recipe: Recipe) -> str:
    """The mapping of the text decoder's fields, "" for the file's top."""
    for path in recipe.part("roots"):
        if config.inside(path):
            return str(path)
        if config.data.get(path) is not None:
            text = f"expected a mapping, got {shown(config.data[path])}"
            raise ProblemsError([Problem(path, text, "the text decoder's fields", config.file)])
    return ""


def _recipes(config: Config) -> Iterator[Recipe]:
    """Recipes for a model_type of the file: its own, or of a part that the recipe takes for the text decoder."""
    for place in _parts(config.top):
        kind = place.data.get("model_type")
        name = recipe_of(kind) if isinstance(kind, str) else None
        recipe = load_recipe(name) if name else None
        if recipe and (not place.path or place.path in recipe.part("roots")):
            yield recipe


def _parts(place: At, depth: int = 2) -> Iterator[At]:
    """The mapping and those in it."""
    yield place
    for key, inner in place.data.items() if depth else ():
        if isinstance(inner, Mapping):
            yield from _parts(At(place.child(key), inner), depth - 1)


def inexpressible(work: _Port) -> list[Problem]:
    """What this model needs and the language does not have, one problem per field."""
    found = []
    for path, entry in work.recipe.part("inexpressible").items():
        if not work.filler.fill(entry.get("when", f"=has({path})"), work.scope, ("inexpressible", path)).value:
            continue
        given = work.filler.fill(f"=get({path}, None)", work.scope, ("inexpressible", path))
        always = entry.get("when") is True  # of all models of the family, whatever the field says
        stands = "" if given.value is None or always else f"is {shown(given.value)}: "
        text = f"{stands}{entry['means']}, which cannot be expressed yet"
        place = "model_type" if always and given.value is None else _in_file(work, path)
        found.append(Problem(place, text, f"needs {entry['needs']}", work.config.file))
    return found


def _in_file(work: _Port, path: str) -> str:
    """The field that a path means whose first word is a `let`."""
    head, _, rest = path.partition(".")
    if not rest or head not in work.scope.lets:
        return path
    place = work.filler.value(head, work.scope, ("inexpressible", path), place=True).value
    return f"{place.path}.{rest}" if isinstance(place, At) else path


def _blocks(work: _Port, entries: list[Tree]) -> tuple[dict[str, Tree], list[Tree]]:
    """The blocks that layers use, and the layers with their final names.

    A block that is like one that no layer uses takes that one's place, name and lines of the table. Others that
    are like it are then said of this one.
    """
    declared: dict[str, Any] = work.recipe.part("blocks")
    used, names = block_names(entries), dict[str, str]()
    bodies: dict[str, Any] = {}
    for name in (one for one in declared if one in used):
        body = declared[name]
        base: str = body.get("like") or ""
        if base and base not in used and base not in names.values():
            names[name], body = base, _in_full(body, declared)
        elif base in names.values():
            body = {"like": base, **changes_of(_in_full(body, declared), bodies[base])}
        bodies[names.get(name, name)] = body
    bodies = dict(sorted(bodies.items(), key=lambda item: _is_ffn(item[1], declared)))
    unknown = [name for name in used if name not in declared]
    assert not unknown, f"recipe {work.recipe.name}: layers use undeclared blocks {unknown}"
    blocks = _filled_blocks(work, bodies)
    for name in declared:
        if entries and name not in used and name not in bodies:
            _note_reads(work, name, declared[name])
    return blocks, [renamed(entry, names) for entry in entries]


def _in_full(body: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """A derived block of the recipe with what its base says."""
    own = {key: item for key, item in body.items() if key != "like"}
    whole: dict[str, Any] = merge_recipe(declared[body["like"]], own)
    return whole


def _filled_blocks(work: _Port, bodies: Mapping[str, Any]) -> dict[str, Tree]:
    """The blocks with their values; those that are like another on top of it."""
    filled: dict[str, Tree] = {
        name: work.filler.fill(body, work.scope, ("blocks", name), keep="like" in body) for name, body in bodies.items()
    }

    def whole(name: str) -> Tree:
        base = bodies[name].get("like")
        return merge_recipe(whole(base), filled[name]) if base else filled[name]

    return {
        name: on_top(body, whole(bodies[name]["like"])) if "like" in bodies[name] else body
        for name, body in filled.items()
    }


def _is_ffn(body: Mapping[str, Any], declared: Mapping[str, Any]) -> bool:
    """Mixers are written before what fills the other slot."""
    kind = body.get("kind", declared.get(body.get("like", ""), {}).get("kind"))
    return kind in BLOCKS and BLOCKS[kind]().SLOT == "ffn"


def _note_reads(work: _Port, name: str, body: Any) -> None:
    """The fields that a block would use which no layer uses; what is wrong with them does not matter."""
    with work.config.recording(keep=False) as found:
        Filler(work.filler.templates).fill(body, work.scope, ("blocks", name))
    work.unread.update({path: name for path in found if path not in work.config.seen.reads})


def _assembled(spec: Mapping[str, Tree]) -> tuple[Graph | None, list[Finding]]:
    """The spec through the checks every spec passes."""
    request, findings = assemble({"model": plain(dict(spec)), "plan": {}}, {"model", "plan"}, ())
    return (request.graph if request else None), findings


def _located(findings: Iterable[Finding], spec: Tree, work: _Port) -> list[Problem]:
    """Findings about the spec as problems of the config fields it came from."""
    problems = []
    for one in findings:
        path = one.path[1:]
        if any(path == place[: len(path)] for place in work.filler.broken):
            continue  # it is incomplete because of a problem that is told
        paths = work.filler.nulls.get(_named(one, path), ()) or reads(_at(spec, path))
        place = paths[0] if len(paths) == 1 else ", ".join(paths[:3])
        text = f"{one.text} (for {dotted(path)})" if paths and path else one.text
        problems.append(Problem(place or dotted(path), text, one.hint, work.config.file))
    return problems


def _named(finding: Finding, path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The spec path of a key that is missing."""
    start = "missing key '"
    return (*path, finding.text.removeprefix(start).rstrip("'")) if finding.text.startswith(start) else path


def _at(tree: Tree, path: Sequence[Any]) -> Tree:
    """The nearest part of the tree that knows where it comes from."""
    for key in path:
        inside = isinstance(tree, dict) or (isinstance(tree, list) and isinstance(key, int) and key < len(tree))
        if not inside or (isinstance(tree, dict) and key not in tree):
            return tree if isinstance(tree, Value) else Value(None)
        tree = tree[key]
    return tree


def _questions(work: _Port, spec: Mapping[str, Tree]) -> dict[str, list[str]]:
    """What the recipe asks of the reader, beside the key it is about or the nearest key around it."""
    found: dict[str, list[str]] = {}
    for about, asks in work.recipe.part("questions").items():
        path = _anchor(about, spec)
        if path is None:
            continue
        for ask in asks if isinstance(asks, list) else [asks]:
            with work.config.recording(keep=False):  # what is only asked about is not used
                asked = work.filler.fill(ask.get("when", True), work.scope, ("questions", about)).value
                text = work.filler.fill(ask["ask"], work.scope, ("questions", about)).value if asked else None
            if text:
                found.setdefault(path, []).append(str(text))
    return found


def _anchor(about: str, spec: Mapping[str, Tree]) -> str | None:
    """The part of the path that the spec has; None when it speaks of a block that is not there."""
    words = about.split(".") if about else []
    if words[:1] == ["blocks"] and words[1] not in spec["blocks"]:
        return None
    tree: Tree = spec
    for number, word in enumerate(words):
        if not isinstance(tree, dict) or (word not in tree and word != "checkpoint"):
            return ".".join(words[:number])
        tree = tree.get(word)
    return about


def _text(
    work: _Port,
    spec: Mapping[str, Tree],
    left: Sequence[Leftover],
    questions: Mapping[str, Sequence[str]],
    cannot: Sequence[Problem],
) -> str:
    style = Style(lambda paths: _sources(work.config, paths), work.recipe.part("notes"), questions)
    head = [*_header(work), *(f"# CANNOT BE EXPRESSED: {one.path}: {one.text} ({one.hint})" for one in cannot)]
    head += [f"# QUESTION: {ask}" for ask in questions.get("", ())]
    report = comment(left, work.config.root)
    return "\n".join(head) + "\n" + render(SECTIONS, spec, style) + ("\n" + "\n".join(report) + "\n" if report else "")


def _header(work: _Port) -> list[str]:
    where = f" below {work.config.root}" if work.config.root else ""
    by = f"specs/families/{work.recipe.name}.yaml"
    made = f"a draft by {by}: its model_type has no recipe" if work.draft else f"by {by}"
    source = f"# A comment names the config field{where} that a value comes from; what has none is"
    computes = f"how the architecture\n# computes: {work.recipe.data.get('source', 'not known yet')}."
    return [
        f"# {work.recipe.data.get('title', 'A model')}",
        f"# Written by `moec port` from config.json, {made}.",
        f"{source} {'a guess, or from the tensors.' if work.draft else computes}",
    ]


def _sources(config: Config, paths: Sequence[str]) -> str:
    """Config paths as a comment says them."""
    words = []
    for path in paths:
        inside = config.root and path.startswith(f"{config.root}.")
        beside = " (top level)" if config.root and not inside else ""
        name = path.removeprefix(f"{config.root}.") + beside
        words.append(f"{name} (not in the file: the default)" if path in config.seen.defaulted else name)
    return ", ".join(words)
