import pytest

import plait


@pytest.mark.parametrize("name", plait.__all__)
def test_public_name_can_be_looked_up(name: str) -> None:
    assert getattr(plait, name) is getattr(plait, name)
