"""Rules of the house that a machine can check."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import bytefloor

PACKAGE = Path(bytefloor.__file__).parent
BELOW = {
    "formats": set(),
    "files": {"formats"},
    "ops": set(),
    "model": {"formats", "files", "ops"},
    "text": set(),
    "engine": {"formats", "files", "ops", "model", "text"},
    "server": {"formats", "files", "ops", "model", "text", "engine"},
    "quantize": {"formats", "files", "ops", "model", "text", "engine"},
    "tools": {"formats", "files", "ops", "model", "text", "engine", "server", "quantize"},
}
"""Which folders a folder may import. Everyone may import errors; cli.py may import anything."""
MAX_LINES = 450
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """bytefloor modules that a file imports, function bodies and type-checking blocks included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return {name for name in found if name.startswith("bytefloor")}


def test_every_folder_has_a_place_in_the_order() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(BELOW)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_only_downward(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    folder = relative.parts[0]
    if len(relative.parts) == 1:
        return
    allowed = BELOW[folder] | {folder, "errors", "__version__"}
    for name in imports_of(path):
        parts = name.split(".")
        assert len(parts) == 1 or parts[1] in allowed, f"{relative} imports {name}"


def module_name(path: Path) -> str:
    return "bytefloor." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def test_there_are_no_import_cycles() -> None:
    names = {module_name(path): path for path in MODULES if path.name != "__init__.py"}
    graph = {name: {other for other in imports_of(path) if other in names} for name, path in names.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail, name))}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", [*MODULES, *sorted(Path(__file__).parent.rglob("*.py"))], ids=str)
def test_files_stay_readable_in_one_sitting(path: Path) -> None:
    n_lines = len(path.read_text().splitlines())
    assert n_lines <= MAX_LINES, f"{path}: {n_lines} lines"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_function_is_typed_and_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.name != "__init__.py" or tree.body:
        assert ast.get_docstring(tree), f"{path} has no docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.returns is not None, f"{path}: {node.name} has no return type"
