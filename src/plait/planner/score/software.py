"""How the software of a row behaves where the row does not say: conventions of its time, not fitted to any row."""

import re
from dataclasses import dataclass

from plait.config.overlap import OverlapConfig
from plait.config.precision import FloatFormat
from plait.config.train import Recompute
from plait.planner.plan_config import Loss, Quantization, Sharded
from plait.planner.score.row import NotCovered, Row

_NONE = OverlapConfig(policy="disabled")
_FULL = OverlapConfig(policy="auto")
_BULK = OverlapConfig(policy="auto", method="bulk")


@dataclass(frozen=True, slots=True)
class Software:
    """Habits of a training library.

    Attributes:
        overlap: of tp collectives, where the row does not say.
        sharded: what its data-parallel ranks share out.
        overlaps_gradients: whether it sums gradients beneath backward; `overlaps_sends` is of the pipeline.
    """

    name: str
    overlap: OverlapConfig
    gradient_dtype: FloatFormat = "float32"
    sharded: Sharded = "optimizer"
    overlaps_gradients: bool = True
    overlaps_sends: bool = True
    loss: Loss = "in_place"


MEGATRON_2022 = Software(
    "Megatron-LM of 2021 and 2022", _BULK, sharded="nothing", overlaps_gradients=False, overlaps_sends=False
)
"""Before the distributed optimizer; backward hides tp collectives beneath wgrad; scores are kept in memory."""
MEGATRON = Software("Megatron-LM", _BULK)
NEMO = Software("NeMo", _FULL, gradient_dtype="bfloat16", loss="fused")
TORCHTITAN = Software("torchtitan", _NONE, sharded="parameters")


def find_software(row: Row) -> Software:
    """Whose habits a row shows."""
    if "torchtitan" in row.text or "async-tp" in row.text:
        return TORCHTITAN
    if "nemo" in row.text or "dgxc" in row.text:
        return NEMO
    return MEGATRON_2022 if "fp16" in row.precision.lower() else MEGATRON


def parse_overlap(row: Row, software: Software) -> OverlapConfig:
    """What is said of tp overlap."""
    if (asked := row.parallel.get("async_tp")) is not None:
        return _FULL if asked else _NONE
    if "ub_tp_comm_overlap" in row.text:
        return _FULL
    if re.search(r"no tp overlap(?! flag)", row.text):
        return _NONE
    return software.overlap


def parse_recompute(row: Row) -> Recompute:
    """What is computed again; a row that does not say computes nothing again."""
    text = str(row.parallel.get("recompute") or "none").lower()
    if "per-op" in text or "per op" in text:
        raise NotCovered("recompute of every other operation is not planned, only of attention cores or whole blocks")
    known: tuple[Recompute, ...] = ("none", "selective", "full")
    for each in known:
        if each in text:
            return each
    raise NotCovered(f"recompute is {text!r}")


def parse_fused_attention(row: Row) -> bool:
    """Whether scores stayed on the chip: as it is said, or by the age of the run."""
    if "no flashattention" in row.text or "unfused" in row.text:
        return False
    return "flash" in row.text or "fused attention" in row.text or find_software(row) is not MEGATRON_2022


def parse_quantization(row: Row) -> Quantization:
    """The recipe; one without a name is that of NVIDIA's libraries, whose scales are those of steps before."""
    text = row.precision.lower()
    if "fp4" in text or "mxfp8" in text:
        raise NotCovered(f"precision {row.precision!r} has no law")
    if "fp8" not in text:
        return "none"
    if "row" in text:
        return "fp8_rowwise"
    return "fp8_currentscaling" if "tensor" in text or "current" in text else "fp8_delayedscaling"


def check_kernels(row: Row) -> None:
    """Raise where a row's time is that of kernels which no law of the catalog is of."""
    if re.search(r"(?<!non)(?<!non-)deterministic", row.text):
        raise NotCovered("deterministic kernels (attention backward above all) have no law: theirs are slower")
    if parse_quantization(row) == "fp8_rowwise":
        raise NotCovered("GEMMs with rowwise scales have no law: the catalog's float8 is tensorwise")
