"""Everything that is verified holds whatever way collectives are plaited into the GEMMs."""

import pytest

from tests.support.verification import verify

ODD = ("model.vocab_size=257", "train.seq_len=7", "model.mlp_width=97")
CASES = {"llama-odd": ("llama-tiny", ODD), "gpt-odd": ("gpt-tiny", ODD)}
WAYS = {
    "ring": ("none", "direct", "ring", "ring_two_way", "bulk"),
    "shm": ("none", "direct", "bulk"),
}


def list_ways():
    return [
        pytest.param(transport, method, id=f"{transport}-{method}") for transport in WAYS for method in WAYS[transport]
    ]


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize(("transport", "method"), list_ways())
def test_overlapped_model_equals_unsharded(ranks, transport, method, tp, sequence_parallel):
    """FIELD 3.5, 3.20: every number of a step, integers bit for bit, every collective and every message."""
    case = "llama-odd" if tp != 3 else "gpt-odd"
    chunks = () if method in ("none", "bulk") else ("overlap.chunks=2",)
    asked = ("overlap=full", f"overlap.transport={transport}", f"overlap.method={method}", *chunks)
    source, overrides = CASES[case]
    report = verify(ranks(tp), source, tp, *overrides, *asked, sequence_parallel=sequence_parallel)
    assert report.passed, report.failures
    ran = {(line.choice.transport, str(line.choice.method)) for line in report.receipt.lines}
    # No GEMM of a forward or of all-reduce mode is independent of what moves; in some of the latter nothing moves.
    assert ran <= {(transport, method), (transport, "none"), ("library", "none")}
    assert (transport, method) in ran or (method == "bulk" and not sequence_parallel)
    moved = [trace.num_promised for trace in report.traces if trace.what == "messages"]
    assert len(moved) == tp
    assert all(moved) == (method != "none" and (transport, method) in ran)
