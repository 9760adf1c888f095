"""What is known of compiling before anything is built."""

import pytest
from torch._inductor import config as inductor

from plait.errors import ConfigError
from plait.parallel.block.compile import check_compiler


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_without_a_compiler_it_is_said_what_to_install() -> None:
    with (
        inductor.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(ConfigError, match=r"needs a C\+\+ compiler on a CPU, and there is no no-such-compiler"),
    ):
        check_compiler()


def test_a_compiler_that_is_there_is_taken() -> None:
    with inductor.patch({"cpp.cxx": (None, "sh")}):
        check_compiler()
