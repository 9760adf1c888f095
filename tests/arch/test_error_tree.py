import re

from plait import errors
from plait.errors import PlaitError
from tests.support.source_tree import ROOT

CLASSES = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, PlaitError)
}


def test_the_tree_drawn_in_the_docstring_is_the_tree_of_classes() -> None:
    assert errors.__doc__ is not None
    path: list[tuple[int, str]] = []
    drawn: dict[str, str | None] = {}
    for indent, name in re.findall(r"^( {4,})([A-Z]\w+)(?: |$)", errors.__doc__, re.MULTILINE):
        while path and path[-1][0] >= len(indent):
            path.pop()
        drawn[name] = path[-1][1] if path else None
        path.append((len(indent), name))
    real = {
        name: next((b.__name__ for b in kind.__bases__ if b.__name__ in CLASSES), None)
        for name, kind in CLASSES.items()
    }
    assert drawn == real


def test_the_reference_has_a_heading_for_every_error() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    assert re.findall(r"^#+ `(\w+)`$", page, re.MULTILINE) == list(CLASSES)
