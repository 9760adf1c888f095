"""Core attention: as one kernel that never writes the scores, and as two GEMMs with the scores in memory."""

from dataclasses import dataclass
from functools import cache
from math import hypot

from plait.planner.assumed import BACKWARD_SCORE_BYTES, FORWARD_SCORE_BYTES
from plait.planner.hardware import Hardware, Regime
from plait.planner.laws.estimate import Estimate, Limit
from plait.planner.laws.gemm import derive_regime_share, estimate_gemm
from plait.planner.laws.memory_bound import estimate_memory_bound

BACKWARD_FLOPS = 2.5
"""Of flash attention, times those of forward: five GEMMs for two, since the scores are computed again."""

UNFUSED_BACKWARD_FLOPS = 2.0
"""The same where the scores are in memory: four GEMMs for two."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one rank; `queries` and `keys` are tokens of one sequence."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_width: int
    causal: bool = True

    @property
    def flops(self) -> float:
        """Forward: two GEMMs; of a causal mask only the half that is needed."""
        full = 4.0 * self.batch * self.heads * self.queries * self.keys * self.head_width
        if not self.causal or self.queries == 1:
            return full
        skipped = min(self.queries, self.keys) / (2 * self.keys)
        return full * (1 - skipped)

    @property
    def num_scores(self) -> int:
        """Elements of the score matrices."""
        return self.batch * self.heads * self.queries * self.keys

    @property
    def bytes(self) -> int:
        """Queries, keys and values read, the output written, in two bytes an element."""
        heads = 2 * self.heads * self.queries + 2 * self.kv_heads * self.keys
        return 2 * self.batch * self.head_width * heads


def estimate_flash_attention(
    hardware: Hardware,
    shape: AttentionShape,
    *,
    backward: bool = False,
    regime: Regime = "training",
    dtype: str = "bfloat16",
) -> Estimate:
    """How long one fused kernel takes; the rate grows with the length of the sequence, up to the peak of `dtype`."""
    law, memory = hardware.attention, hardware.memory
    rate = law.flops_per_s.value * shape.keys / (shape.keys + law.half_length.value)
    rate *= derive_regime_share(hardware.derate, regime, "burst")
    passes = 1.0
    if backward:
        passes, rate = BACKWARD_FLOPS, rate * law.backward_rate.value
    compute_s = passes * shape.flops / min(rate, hardware.peak(dtype).value)
    memory_s = passes * shape.bytes / memory.streamed_bytes_per_s
    seconds = memory.launch_s.value + max(compute_s, memory_s)
    limit: Limit = "compute" if compute_s >= memory_s else "memory"
    return Estimate(seconds, *_describe(hardware, backward, regime), limit)


@cache
def _describe(hardware: Hardware, backward: bool, regime: Regime) -> tuple[float, tuple[str, ...]]:
    law, memory = hardware.attention, hardware.memory
    doubtful = [law.flops_per_s]
    if backward:
        doubtful.append(law.backward_rate)
    if regime != "burst":
        doubtful.append(hardware.derate.sustained if regime == "sustained" else hardware.derate.training)
    used = (*doubtful, law.half_length, memory.bytes_per_s, memory.efficiency, memory.launch_s)
    return hypot(*(constant.uncertainty for constant in doubtful)), tuple(constant.name for constant in used)


def estimate_unfused_attention(
    hardware: Hardware, shape: AttentionShape, *, backward: bool = False, regime: Regime = "training"
) -> Estimate:
    """How long two batched GEMMs (four in backward), softmax and dropout take, with the scores in memory.

    The mask saves nothing here: every score is computed.
    """
    count = shape.batch * shape.heads
    queries, keys, width = shape.queries, shape.keys, shape.head_width
    shapes = [(queries, keys, width), (queries, width, keys)]
    if backward:
        shapes = [(queries, keys, width), (keys, width, queries), (queries, width, keys), (keys, width, queries)]
    gemms = [estimate_gemm(hardware, *mnk, regime=regime, count=count) for mnk in shapes]
    each = BACKWARD_SCORE_BYTES if backward else FORWARD_SCORE_BYTES
    scores = estimate_memory_bound(hardware, each.value * shape.num_scores, kernels=2)
    gemm_s = sum(gemm.seconds for gemm in gemms)
    seconds = gemm_s + scores.seconds
    doubt = hypot(scores.uncertainty, each.uncertainty)
    uncertainty = (gemm_s * gemms[0].uncertainty + scores.seconds * doubt) / seconds
    constants = tuple(dict.fromkeys((*gemms[0].constants, *scores.constants, each.name)))
    return Estimate(seconds, uncertainty, constants, "memory" if scores.seconds > gemm_s else "compute")
