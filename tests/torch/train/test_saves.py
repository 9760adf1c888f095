"""What becomes of a save under way when a run ends early."""

from unittest.mock import Mock

import pytest

from plait.checkpoint.background import BackgroundSave
from plait.errors import PlaitError, TransportError
from plait.train.saves import Saves
from plait.train.step import Trainer


def _leave_with(error: BaseException) -> Mock:
    under_way = Mock(spec=BackgroundSave)
    saves = Saves(Mock(spec=Trainer, run=Mock()), {})
    saves._under_way = under_way
    with pytest.raises(type(error)), saves:
        raise error
    return under_way


@pytest.mark.parametrize("error", [TransportError("a rank is lost"), KeyboardInterrupt()])
def test_it_is_given_up_where_nothing_is_to_be_waited_for(error: BaseException) -> None:
    """Ctrl-C once more interrupts at once, not when a disk has taken all."""
    under_way = _leave_with(error)
    under_way.abandon.assert_called_once()
    under_way.end.assert_not_called()


def test_after_another_error_it_may_come_to_its_end() -> None:
    under_way = _leave_with(PlaitError("diverged"))
    under_way.end.assert_called_once()
    under_way.abandon.assert_not_called()
