import re

from tests.support.source_tree import ROOT, list_files

RULES = set(re.findall(r"^\| (3\.\d+) \|", (ROOT / "docs/concepts/faults.md").read_text(), re.MULTILINE))
CITATION = re.compile(r"FIELD:? ?3\.\d+(?:(?:, | and )3\.\d+)*")


def _list_cited() -> set[str]:
    texts = [path.read_text() for path in list_files(ROOT / "tests")]
    return {rule for text in texts for cited in CITATION.findall(text) for rule in re.findall(r"3\.\d+", cited)}


def test_every_rule_is_named_by_a_test() -> None:
    assert sorted(RULES - _list_cited()) == []


def test_every_rule_that_a_test_names_is_explained() -> None:
    assert sorted(_list_cited() - RULES) == []
