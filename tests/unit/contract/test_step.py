import pytest

from plait.contract.collective import Collective
from plait.contract.step import Gemm
from plait.sharding import Kind


def test_a_gemm_counts_a_multiplication_and_an_addition() -> None:
    assert Gemm("w", "forward", 3, 5, 7).flops == 2 * 3 * 5 * 7
    assert Gemm("attention", "forward", 3, 5, 7, count=4).flops == 4 * 2 * 3 * 5 * 7


def test_intensity_is_flops_per_byte_of_operands_and_result() -> None:
    gemm = Gemm("w", "forward", 2, 4, 8)
    assert gemm.moved_bytes("bfloat16") == 2 * (2 * 4 + 4 * 8 + 2 * 8)
    assert gemm.intensity("bfloat16") == 128 / 112
    assert gemm.intensity("float32") == gemm.intensity("bfloat16") / 2


def test_an_empty_gemm_has_no_intensity() -> None:
    assert Gemm("w", "forward", 0, 4, 0).intensity("float32") == 0


@pytest.mark.parametrize(
    ("kind", "sent"),
    [(Kind.ALL_GATHER, 768), (Kind.REDUCE_SCATTER, 768), (Kind.ALL_REDUCE, 1536), (Kind.ALL_TO_ALL, 192)],
)
def test_a_rank_sends_its_part_of_the_payload(kind: Kind, sent: float) -> None:
    """Three of four parts of 1024 bytes; an all-reduce is both; an all-to-all has only the own quarter to send."""
    collective = Collective(kind, "tp", 4, (16, 16), "float32")
    assert collective.payload_bytes == 1024
    assert collective.wire_bytes_per_rank == sent
