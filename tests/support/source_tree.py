"""The package's own source, parsed: files, functions and what pyproject.toml says about them."""

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "plait"


@dataclass(frozen=True)
class Function:
    """One function or method with what the size limits count."""

    where: str
    num_lines: int
    num_parameters: int


def list_files(folder: Path = PACKAGE) -> list[Path]:
    """Every Python file under `folder`."""
    return sorted(folder.rglob("*.py"))


def list_functions(path: Path) -> Iterator[Function]:
    """Every function in `path`; lines without the docstring, parameters without self and cls."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
            yield Function(where, _num_lines(node), _num_parameters(node))


def load_import_contracts() -> list[dict[str, list[str] | str]]:
    """The import-linter contracts of pyproject.toml."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts: list[dict[str, list[str] | str]] = pyproject["tool"]["importlinter"]["contracts"]
    return contracts


def _num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    first = node.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
    return node.end_lineno - node.lineno + 1 - docstring


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls", "ctx")])
