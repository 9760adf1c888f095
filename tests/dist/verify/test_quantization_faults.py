"""Breaking any one thing of quantization on purpose makes a verification fail."""

import pytest

from plait.comm.launch import LocalRanks
from plait.contract.training import derive_run_model
from plait.errors import TransportError
from tests.support.mutations import MutatedRanks, Slip
from tests.support.quantization_faults import FAULTS, break_ranks
from tests.support.rank_pool import TIMEOUT_S
from tests.support.verification import build_config, verify

SMALL = (
    "model.num_layers=1", "model.width=128", "model.num_heads=4", "model.num_kv_heads=2", "model.mlp_width=192",
    "train.seq_len=32", "quantization.keep_first=0", "quantization.keep_last=0",
)  # fmt: skip

CUT = (
    "overlap=full",
    "overlap.transport=ring",
    "overlap.method=direct",
    "overlap.chunks=2",
    "train.micro_batch_size=6",
)
"""Three blocks of tokens a rank, which two pieces of equal length would tear."""

CUT_INSIDE = "a chunk cut inside a block"

FOUND_BY = {
    "own largest magnitude": ("fp8_currentscaling", "logits"),
    "scales of blocks dropped": ("mxfp8", "logits"),
    "columns rounded from rows": ("mxfp8", "gradient of layers.*.mlp"),
    "rounding noise by local token": ("nvfp4", "gradient of layers.*.mlp"),
    "rounding noise by local feature": ("nvfp4", "gradient of layers.*.mlp"),
    "own history": ("fp8_delayedscaling", "calibrated logits"),
    "histories never updated": ("fp8_delayedscaling", "collectives"),
}


def list_promised(recipe, sequence_parallel):
    config = build_config("llama-tiny", 2, *SMALL, f"quantization={recipe}", sequence_parallel=sequence_parallel)
    return derive_run_model(config, 0, is_calibrated=False).micro_batch_collectives


def list_slips():
    """Every agreement on largest magnitudes, and what is gathered of the MLP, forgotten one at a time."""
    for recipe in ("fp8_currentscaling", "nvfp4"):
        for sequence_parallel in (True, False):
            for index, collective in enumerate(list_promised(recipe, sequence_parallel)):
                if (collective.op == "max" and collective.dtype == "float32") or collective.dtype == "uint8":
                    mode = "sp" if sequence_parallel else "ar"
                    name = f"{recipe}-{mode}-{index}-{collective}".replace(" ", "_")
                    yield pytest.param(recipe, sequence_parallel, Slip(index, "drop"), id=name)


def list_failed(report):
    failed = {row.what for row in report.rows if not row.passed}
    failed |= {check.what for check in report.exact if not check.passed}
    return failed | {trace.what for trace in report.traces if not trace.passed}


@pytest.mark.parametrize(("recipe", "sequence_parallel", "slip"), list(list_slips()))
def test_every_collective_of_quantization_that_is_forgotten_is_found(ranks, recipe, sequence_parallel, slip):
    """It is recorded as if nothing were wrong: the numbers alone must show it."""
    broken = MutatedRanks(ranks(2), slip)
    report = verify(broken, "llama-tiny", 2, *SMALL, f"quantization={recipe}", sequence_parallel=sequence_parallel)
    assert not all(row.passed for row in report.rows)
    assert "collectives" not in list_failed(report)


@pytest.mark.parametrize("fault", FOUND_BY)
def test_every_fault_is_found_where_it_shows_first(ranks, fault):
    recipe, place = FOUND_BY[fault]
    report = verify(break_ranks(ranks(2), fault), "llama-tiny", 2, *SMALL, f"quantization={recipe}")
    assert not report.passed
    assert place in list_failed(report), report.failures


def test_a_chunk_cut_inside_a_block_is_refused_by_what_reads_it():
    """The ranks end in the middle of a pass, so they are nobody else's."""
    with LocalRanks(2, timeout_s=TIMEOUT_S, device_type="cpu") as ranks:
        broken = break_ranks(ranks, CUT_INSIDE)
        with pytest.raises(TransportError, match="invalid for input of size 192"):
            verify(broken, "llama-tiny", 2, *SMALL, "quantization=mxfp8", *CUT)


@pytest.mark.parametrize("recipe", ["fp8_delayedscaling", "mxfp8", "nvfp4"])
def test_without_a_mistake_the_same_verification_passes(ranks, recipe):
    overrides = CUT if recipe == "mxfp8" else ()
    report = verify(ranks(2), "llama-tiny", 2, *SMALL, f"quantization={recipe}", *overrides)
    assert report.passed, report.failures


def test_every_fault_is_tried():
    assert {*FOUND_BY, CUT_INSIDE} == set(FAULTS)
