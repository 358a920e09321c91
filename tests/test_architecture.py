"""The rooms are as `docs/architecture.md` draws them, and the files that pages name exist."""

from __future__ import annotations

import ast
import collections
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.pages import ROOT

PACKAGE = ROOT / "flaxckpt"
PICTURE = ROOT / "docs" / "architecture.md"
# These start within a quarter of a second, so they import none of the slow libraries.
LIGHT_COMMANDS = ("flaxckpt.cli.ls", "flaxckpt.cli.rm", "flaxckpt.cli.pin")
SLOW = {"jax", "numpy", "tensorstore", "flax", "optax", "clu"}
# What jax does not promise, under names that do not begin with an underscore.
PRIVATE_OF_JAX = {"batched_device_put", "convert_element_type_p", "global_state"}


class Import(NamedTuple):
    """A module that another one imports, and where: at the top, in a function, or for types."""

    target: str
    where: str
    line: int


@functools.cache
def modules() -> dict[str, Path]:
    found = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


@functools.cache
def tree_of(module: str) -> ast.Module:
    tree = ast.parse(modules()[module].read_text())
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    return tree


def place_of(node: ast.AST) -> str:
    """Where an import is: `top`, `function` or `types`."""
    while (node := getattr(node, "parent", None)) is not None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return "function"
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return "types"
    return "top"


@functools.cache
def imports_of(module: str) -> tuple[Import, ...]:
    """All imports of `module`, also those of other libraries, by the name of the module."""
    found = []
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules() else node.module or "" for name in inner]
        else:
            continue
        found += [Import(name, place_of(node), node.lineno) for name in names]
    return tuple(found)


def own_imports(module: str) -> Iterator[Import]:
    return (i for i in imports_of(module) if i.target in modules() and i.target != module)


def room_of(module: str) -> str:
    """The folder or the module right under `flaxckpt`."""
    return [*module.split("."), "__init__"][1]


@functools.cache
def floors() -> dict[str, int]:
    """The floor of each room, counted from the top of the picture in `docs/architecture.md`."""
    picture = re.search(r"```text title=\"rooms\"\n(.*?)```", PICTURE.read_text(), re.DOTALL)
    assert picture, "docs/architecture.md has no block with the title `rooms`"
    lines = [re.split(r"  +", line)[0].split() for line in picture[1].splitlines() if line.strip()]
    return {room.removesuffix("/"): floor for floor, line in enumerate(lines) for room in line}


def test_the_picture_has_every_room_and_no_other():
    assert set(floors()) == {room_of(module) for module in modules()}


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_down_only(module):
    """All of them: at the top, in functions, and for types."""
    mine = room_of(module)
    up = [
        f"{modules()[module].relative_to(ROOT)}:{found.line} imports {found.target} ({found.where})"
        for found in own_imports(module)
        if room_of(found.target) != mine and floors()[room_of(found.target)] <= floors()[mine]
    ]
    assert not up, "\n".join(up)


def test_no_modules_import_each_other_in_a_circle():
    """Not even through functions; `__init__` only collects the public names."""
    state: dict[str, str] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        if state.get(module) == "done":
            return
        assert state.get(module) != "open", " -> ".join((*path[path.index(module) :], module))
        state[module] = "open"
        for found in own_imports(module):
            visit(found.target, (*path, module))
        state[module] = "done"

    for module in modules():
        visit(module, ())


def _names_in(node: ast.AST) -> set[str]:
    named = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return named | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def _types_asked_for(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """The classes in each `isinstance`, `issubclass`, `type(x) is` and `case Class()`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, classes]):
                yield node.lineno, _names_in(classes)
            case ast.Compare(left=ast.Call(func=ast.Name(id="type"))):
                yield node.lineno, set().union(*map(_names_in, node.comparators))
            case ast.MatchClass(cls=cls):
                yield cls.lineno, _names_in(cls)


def test_nobody_outside_store_asks_which_store_it_is():
    stores = {"Path", "PosixPath", "PurePath", "PurePosixPath"}
    for module in ("flaxckpt.store.store", "flaxckpt.store.local", "flaxckpt.store.bucket"):
        stores |= {n.name for n in tree_of(module).body if isinstance(n, ast.ClassDef)}
    assert len(stores) > 5
    found = [
        f"{modules()[module].relative_to(ROOT)}:{line} asks for {', '.join(sorted(asked & stores))}"
        for module in sorted(modules())
        if room_of(module) != "store"
        for line, asked in _types_asked_for(tree_of(module))
        if asked & stores
    ]
    assert not found, "\n".join(found)


def test_no_name_of_a_class_is_there_twice():
    """Also not with an underscore in front, and not as the name of an alias."""
    classes, aliases = collections.defaultdict(list), collections.defaultdict(list)
    for module in modules():
        for node in tree_of(module).body:
            match node:
                case ast.ClassDef(name=name):
                    classes[name.lstrip("_")].append(module)
                case ast.Assign(targets=[ast.Name(id=name)]) if re.match("_?[A-Z][a-z]", name):
                    aliases[name.lstrip("_")].append(module)
    twice = {name: found + aliases[name] for name, found in classes.items()}
    assert not {name: found for name, found in twice.items() if len(found) > 1}


def test_no_name_of_a_module_is_there_twice():
    files = [p.name for p in modules().values() if p.name not in ("__init__.py", "__main__.py")]
    assert [name for name, count in collections.Counter(files).items() if count > 1] == []
    assert not {"utils.py", "helpers.py", "common.py", "misc.py"} & set(files)


def _is_private(node: ast.AST) -> bool:
    """Whether it is a name that jax does not promise."""
    match node:
        case ast.Import(names=names):
            return any("jax._" in alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            return "jax._" in module or (
                module.split(".")[0] == "jax"
                and any(a.name in PRIVATE_OF_JAX or a.name.startswith("_") for a in names)
            )
        case ast.Attribute(attr=name):
            root = ast.unparse(node).split(".")[0]
            return name in PRIVATE_OF_JAX or name == "_impl" or (root == "jax" and name[0] == "_")
        case ast.Constant(value=str(text)):
            return text.startswith("jax._")
    return False


def test_private_names_of_jax_are_in_one_module():
    found = collections.defaultdict(set)
    for module in modules():
        for node in ast.walk(tree_of(module)):
            if _is_private(node):
                found[module].add(node.lineno)
    assert set(found) == {"flaxckpt.jax_private"}, dict(found)


def test_light_commands_import_nothing_slow():
    """At the top of any module that `ls`, `rm` and `pin` import, in their functions or above."""
    reached = {"flaxckpt.cli.main": ("flaxckpt.cli.main",)}
    reached |= {command: (command,) for command in LIGHT_COMMANDS}
    todo, slow = list(reached), []
    while todo:
        module = todo.pop()
        for found in imports_of(module):
            if found.where == "types":
                continue
            if found.where == "function" and module not in LIGHT_COMMANDS:
                continue
            if found.target.split(".")[0] in SLOW:
                slow.append(f"{' -> '.join(reached[module])} imports {found.target}")
            elif found.target in modules() and found.target not in reached:
                reached[found.target] = (*reached[module], found.target)
                todo.append(found.target)
    assert len(reached) > 5
    assert not slow, "\n".join(slow)


@pytest.mark.parametrize("page", [PICTURE, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    """In text, tables and pictures."""
    text = page.read_text()
    paths = set(re.findall(r"(?<![\w./-])((?:[\w-]+/)*[\w-]+\.(?:py|md|toml))\b", text))
    assert len(paths) > 5
    tops = (ROOT, PACKAGE)
    missing = [path for path in paths if not any((top / path).is_file() for top in tops)]
    assert not missing


def test_names_are_in_the_files_in_which_contributing_finds_them():
    text, tops = (ROOT / "CONTRIBUTING.md").read_text(), (ROOT, PACKAGE)
    claims = re.findall(r"`(\w+)` in `([\w/.-]+\.py)`", text)
    assert len(claims) > 6
    for name, path in claims:
        file = next(top / path for top in tops if (top / path).is_file())
        assert re.search(rf"\b{name}\b", file.read_text()), f"{path} has no {name}"
