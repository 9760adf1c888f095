import signal
import threading

import pytest

from plait.train import stop
from plait.train.stop import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_remembered_and_passed_on_once(number: signal.Signals) -> None:
    passed: list[int] = []
    with StopRequest(lambda: passed.append(1)) as request:
        assert not request.is_made
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert request.is_made
    assert passed == [1]


def test_the_same_press_reported_twice_does_not_interrupt_but_another_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sends its ranks the SIGINT that the terminal sent them already."""
    with StopRequest():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(stop, "_SAME_PRESS_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def enter() -> None:
        with StopRequest():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
