import pickle

import pytest

from plait import errors
from plait.errors import ConfigError, PlaitError, ShardingError, TransportError, TransportTimeout

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PlaitError)]


def test_a_hint_stands_after_a_blank_line() -> None:
    assert str(PlaitError("8 heads over 9 ranks", hint="use a degree of at most 8")) == (
        "8 heads over 9 ranks\n\nhint: use a degree of at most 8"
    )
    assert str(PlaitError("8 heads over 9 ranks")) == "8 heads over 9 ranks"


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_cross_process_boundaries_with_their_hint(kind: type[PlaitError]) -> None:
    there = pickle.loads(pickle.dumps(kind("wk: 8 heads", hint="use tp = 4")))
    assert type(there) is kind
    assert (there.message, there.hint) == ("wk: 8 heads", "use tp = 4")
    assert str(there) == "wk: 8 heads\n\nhint: use tp = 4"


def test_wrong_values_are_value_errors_and_a_timeout_is_a_transport_error() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ShardingError, ValueError)
    assert issubclass(TransportTimeout, TransportError)


def test_all_problems_of_a_config_come_in_one_error() -> None:
    error = ConfigError.from_problems("run.toml", ["tp: 0 is not positive", "steps: missing"], hint="see configs/")
    assert error.message == "run.toml: 2 problems\n  - tp: 0 is not positive\n  - steps: missing"
    assert error.hint == "see configs/"


def test_a_single_problem_takes_one_line() -> None:
    assert str(ConfigError.from_problems("run.toml", ["steps: missing"])) == "run.toml: steps: missing"
