"""The shape table in the docstring of a runtime operation says what its contract says."""

import ast
import re
from collections.abc import Iterator

import pytest

from plait.contract.report.table import DERIVATIONS, build_shape_table
from plait.sharding import Kind
from tests.support.source_tree import PACKAGE, list_files

MOVES = re.compile("|".join(kind.value for kind in Kind if kind.is_collective))
LAYOUT = re.compile(r"^    (\w+) +(\[[^]]*\](?: -> the same)?)", re.MULTILINE)
PHASE = re.compile(r"^    (forward|backward|dgrad|wgrad|bias) +([^[\n].*)$", re.MULTILINE)
ALTERNATIVE = re.compile(r"\(or (\w+)\)")


def _list_docstrings() -> Iterator[tuple[str, str]]:
    """Contract and docstring of everything that says it has a contract."""
    for path in list_files(PACKAGE):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                docstring = ast.get_docstring(node) or ""
                for contract in re.findall(r"Contract: `contract\.([\w.]+)`", docstring):
                    yield contract, docstring


DOCSTRINGS = dict(_list_docstrings())


def _kinds(docstring: str, *, forward: bool, all_reduce_mode: bool) -> set[str]:
    """Collectives that the lines of a phase name; `(or X)` is what all-reduce mode has instead."""
    lines = [text for phase, text in PHASE.findall(docstring) if (phase == "forward") == forward]
    assert lines, docstring
    if all_reduce_mode:
        return {name for line in lines for text in ALTERNATIVE.findall(line) for name in MOVES.findall(text)}
    return {name for line in lines for name in MOVES.findall(ALTERNATIVE.sub("", line))}


def test_every_contract_has_a_twin_and_every_twin_a_contract() -> None:
    assert set(DOCSTRINGS) == set(DERIVATIONS)


@pytest.mark.parametrize("contract", DERIVATIONS)
def test_layouts_are_those_of_the_contract(contract: str) -> None:
    assert dict(LAYOUT.findall(DOCSTRINGS[contract])) == dict(build_shape_table(contract).layouts)


@pytest.mark.parametrize("contract", DERIVATIONS)
def test_collectives_are_those_of_the_contract(contract: str) -> None:
    table, docstring = build_shape_table(contract), DOCSTRINGS[contract]
    assert _kinds(docstring, forward=True, all_reduce_mode=False) == table.forward
    assert _kinds(docstring, forward=False, all_reduce_mode=False) == table.backward
    if ALTERNATIVE.search(docstring):
        assert _kinds(docstring, forward=True, all_reduce_mode=True) == table.forward_in_all_reduce_mode
        assert _kinds(docstring, forward=False, all_reduce_mode=True) == table.backward_in_all_reduce_mode


def test_this_comparison_sees_a_wrong_table() -> None:
    wrong = DOCSTRINGS["linear.derive_row"].replace("reduce_scatter", "all_reduce").replace("[T, F/tp]", "[T/tp, F]")
    assert _kinds(wrong, forward=True, all_reduce_mode=False) != build_shape_table("linear.derive_row").forward
    assert dict(LAYOUT.findall(wrong)) != dict(build_shape_table("linear.derive_row").layouts)
