"""The shape tables in docstrings of the runtime say what the contracts say; nothing is imported, the source is read."""

import ast
import re
from pathlib import Path

import pytest

from plait.contract.report.table import DERIVATIONS, ShapeTable, build_shape_table
from plait.sharding import Kind

PACKAGE = Path(__file__).parents[2] / "src" / "plait"
PHASES = {"forward": "forward", "backward": "backward", "dgrad": "backward", "wgrad": "backward", "bias": "backward"}
COLLECTIVE = re.compile("|".join(kind for kind in Kind if kind.is_collective))
ROW = re.compile(r"(\w+) +(\[[^]]*\](?: -> the same)?)")


def _list_docstrings() -> list[str]:
    docstrings = []
    for path in sorted((PACKAGE / "parallel").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                docstrings.append(text)
    return [text for text in docstrings if "Contract: " in text]


DOCSTRINGS = {re.search(r"Contract: `contract\.([\w.]+)`", text).group(1): text for text in _list_docstrings()}  # type: ignore[union-attr]


def _read_rows(docstring: str) -> dict[str, str]:
    rows = (ROW.match(line.strip()) for line in docstring.splitlines())
    return {row[1]: row[2] for row in rows if row}


def _read_kinds(docstring: str, phase: str) -> set[str]:
    lines = (line.strip() for line in docstring.splitlines())
    of_phase = [line for line in lines if PHASES.get(line.partition(" ")[0]) == phase]
    assert of_phase, f"says nothing of {phase}"
    return set(COLLECTIVE.findall(" ".join(of_phase)))


def test_every_contract_with_a_table_has_a_docstring_that_names_it() -> None:
    assert set(DOCSTRINGS) == set(DERIVATIONS)


@pytest.mark.parametrize("contract", DERIVATIONS)
def test_docstring_has_the_layouts_of_the_contract(contract: str) -> None:
    assert _read_rows(DOCSTRINGS[contract]) == build_shape_table(contract).layouts


@pytest.mark.parametrize("contract", DERIVATIONS)
def test_docstring_has_the_collectives_of_the_contract(contract: str) -> None:
    """It must name those of sequence parallelism, may name those of all-reduce mode, and no others."""
    table: ShapeTable = build_shape_table(contract)
    forward, backward = (_read_kinds(DOCSTRINGS[contract], phase) for phase in ("forward", "backward"))
    assert table.forward <= forward <= table.forward | table.forward_in_all_reduce_mode
    assert table.backward <= backward <= table.backward | table.backward_in_all_reduce_mode


def test_a_table_prints_as_a_docstring_carries_it() -> None:
    assert str(build_shape_table("linear.derive_row")).splitlines() == [
        "x_shard   [T, F/tp]",
        "w_shard   [D, F/tp]",
        "bias      [D]",
        "y_shard   [T/tp, D]",
        "",
        "forward   reduce_scatter",
        "backward  all_gather",
    ]
