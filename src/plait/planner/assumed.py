"""Constants of the planner itself, which no catalog can state: how software, not hardware, behaves."""

from collections.abc import Iterable

from plait.planner.hardware import Constant, Hardware, Provenance


def _assume(
    name: str, value: float, unit: str, source: str, *, low: float | None = None, high: float | None = None
) -> Constant:
    return Constant(name, value, unit, Provenance.ASSUMED, source, "2026-11-30", "medium", None, low, high)


LOGIT_BYTES = _assume(
    "planner.logit_bytes", 8.0, "B",
    "a loss in place: bfloat16 logits, float32 softmax that becomes its gradient, bfloat16 gradient: 2 + 4 + 2",
    low=6.0, high=10.0,
)  # fmt: skip
"""Of each logit at the peak of the loss."""

FUSED_LOGIT_BYTES = _assume(
    "planner.fused_logit_bytes", 14.0, "B",
    "Megatron-Core's fused cross entropy: logits in bfloat16 and in float32, exponentials, gradient: 2 + 4 + 4 + 4",
    low=10.0, high=16.0,
)  # fmt: skip
"""The same where kernels are fused by a compiler, which writes each result anew."""

DRAWN_LOGIT_BYTES = _assume(
    "planner.drawn_logit_bytes", 10.0, "B", "bfloat16 logits beside those in float32 and their probabilities",
    low=6.0, high=14.0,
)  # fmt: skip
"""Of each logit where a server draws a token, which every rank does of all the vocabulary."""

LIBRARY_BYTES = _assume("planner.library_bytes", 0.4e9, "B", "buffers of NCCL's channels", low=0.2e9, high=1e9)
"""Beside what the allocator counts."""

CONTEXT_BYTES = _assume(
    "planner.context_bytes", 2.0 * 2**30, "B", "CUDA context, workspaces and fragments", low=1e9, high=3.5e9
)
"""What must be free beside the prediction before a plan is said to fit."""

MEMORY_MARGIN = _assume("planner.memory_margin", 1.07, "1", "largest error of peak memory on published rows")

LOGIT_TRAFFIC_BYTES = _assume(
    "planner.logit_traffic_bytes", 10.0, "B",
    "cross entropy, forward and backward: read for the maximum and the sum, read and written for its gradient",
)  # fmt: skip
"""Of each logit, through memory."""

OPTIMIZER_TRAFFIC_BYTES = _assume(
    "planner.optimizer_traffic_bytes", 30.0, "B",
    "AdamW: gradient, master weight and both moments read, the latter three and the parameter written",
)  # fmt: skip
"""Of each parameter of a rank's share of the optimizer state, through memory."""

FORWARD_SCORE_BYTES = _assume(
    "planner.forward_score_bytes", 9.0, "B",
    "unfused core attention: softmax reads and writes, dropout reads, writes and keeps its mask", low=9.0, high=11.0,
)  # fmt: skip
"""Of each attention score through memory, where scores leave the chip."""

BACKWARD_SCORE_BYTES = _assume(
    "planner.backward_score_bytes", 11.0, "B",
    "unfused core attention: dropout reads a gradient and the mask and writes, softmax reads both and writes",
    low=9.0, high=11.0,
)  # fmt: skip

BACKWARD_WINDOW = _assume(
    "planner.backward_window", 0.9, "1", "share of backward beneath which gradients can be summed", low=0.5, high=1.0
)

EXPOSED_LATENCIES = _assume(
    "planner.exposed_latencies", 3.0, "1", "collectives shorter than three latencies gained nothing from overlap"
)
"""So many latencies of the links are never hidden, so that of a small collective nothing is."""

_ALL = (
    LOGIT_BYTES, FUSED_LOGIT_BYTES, DRAWN_LOGIT_BYTES, LIBRARY_BYTES, CONTEXT_BYTES, MEMORY_MARGIN, LOGIT_TRAFFIC_BYTES,
    OPTIMIZER_TRAFFIC_BYTES, FORWARD_SCORE_BYTES, BACKWARD_SCORE_BYTES, BACKWARD_WINDOW, EXPOSED_LATENCIES,
)  # fmt: skip

_BY_NAME = {constant.name: constant for constant in _ALL}


def find_constants(names: Iterable[str], hardware: Hardware) -> tuple[Constant, ...]:
    """Constants that costs name, of the catalog or of the planner, each once."""
    known = hardware.constants
    return tuple(known[name] if name in known else _BY_NAME[name] for name in dict.fromkeys(names))
