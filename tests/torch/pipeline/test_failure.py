"""What is said of a schedule that fails."""

import pytest

from plait.errors import ContractError, TransportError, TransportTimeout
from plait.parallel.pipeline.schedule import explain_failure


def _wrap(cause: BaseException) -> RuntimeError:
    """As torch does with what a stage raises."""
    error = RuntimeError("stage 1 failed to run forward")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("cause", [IndexError("out of range"), ContractError("rows are missing")])
def test_what_a_stage_raised_comes_out_as_it_was(cause):
    assert explain_failure(_wrap(cause)) is cause
    assert explain_failure(_wrap(_wrap(ContractError("deeper")))).args[0] == "deeper"


def test_what_torch_did_not_wrap_is_no_failure_of_a_link():
    """The loss of the last stage is computed outside what torch wraps; a link that failed would be tried again."""
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    assert explain_failure(error) is error


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer", TransportError),
        ("[.../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv", TransportTimeout),
    ],
)
def test_a_stage_that_is_lost_is_one(text, kind):
    for error in (RuntimeError(text), _wrap(RuntimeError(text))):
        assert type(explain_failure(error)) is kind
