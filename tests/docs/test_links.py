import re
from pathlib import Path

import pytest

from tests.support.markdown import list_pages
from tests.support.source_tree import ROOT


@pytest.mark.parametrize("page", list_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", prose) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
