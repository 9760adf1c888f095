"""The package stays readable in one sitting. Limits are those of the code we admire; there is no list of exceptions."""

from statistics import median, quantiles

import pytest

from tests.support.source_tree import PACKAGE, Function, list_files, list_functions

FILE_LINES_MEDIAN, FILE_LINES_P90, FILE_LINES_MAX = 150, 300, 400
FUNCTION_LINES_MEDIAN, FUNCTION_LINES_P90, FUNCTION_LINES_MAX = 12, 35, 60
PARAMETERS_MAX = 8
FILES_IN_A_ROOM_MAX = 14


@pytest.fixture(scope="module")
def file_lines() -> dict[str, int]:
    return {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in list_files()}


@pytest.fixture(scope="module")
def functions() -> list[Function]:
    return [function for path in list_files() for function in list_functions(path)]


def _p90(values: list[int]) -> float:
    return quantiles(values, n=10)[-1]


def test_files_are_short(file_lines: dict[str, int]) -> None:
    lengths = list(file_lines.values())
    assert median(lengths) <= FILE_LINES_MEDIAN
    assert _p90(lengths) <= FILE_LINES_P90
    assert [path for path, lines in file_lines.items() if lines > FILE_LINES_MAX] == []


def test_functions_are_short(functions: list[Function]) -> None:
    lengths = [function.num_lines for function in functions]
    assert median(lengths) <= FUNCTION_LINES_MEDIAN
    assert _p90(lengths) <= FUNCTION_LINES_P90
    assert [function for function in functions if function.num_lines > FUNCTION_LINES_MAX] == []


def test_parameter_lists_are_short(functions: list[Function]) -> None:
    assert [function for function in functions if function.num_parameters > PARAMETERS_MAX] == []


def test_rooms_are_small() -> None:
    rooms = {path.parent for path in list_files()}
    crowded = {
        str(room.relative_to(PACKAGE)): len(files)
        for room in rooms
        if len(files := [path for path in room.glob("*.py") if path.name != "__init__.py"]) > FILES_IN_A_ROOM_MAX
    }
    assert crowded == {}
