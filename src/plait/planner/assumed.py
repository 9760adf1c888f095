"""Constants of the planner itself, which no catalog can state: how software, not hardware, behaves."""

from plait.planner.hardware.constant import Constant, Provenance

_COST_MODEL = "plait's cost model study"


def _assume(
    name: str, value: float, unit: str, source: str, *, low: float | None = None, high: float | None = None,
    provenance: Provenance = Provenance.ASSUMED, confidence: str = "medium",
) -> Constant:  # fmt: skip
    return Constant(name, value, unit, provenance, source, "2026-11-30", confidence, None, low, high)


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

LOGIT_TRAFFIC_BYTES = _assume("planner.logit_traffic_bytes", 10.0, "B", _COST_MODEL)
"""Of each logit, through memory in forward, and as many in backward."""

OPTIMIZER_TRAFFIC_BYTES = _assume(
    "planner.optimizer_traffic_bytes", 30.0, "B",
    "AdamW: gradient, master weight and both moments read, the latter three and the parameter written",
)  # fmt: skip
"""Of each parameter of a rank's share of the optimizer state."""

LIBRARY_BYTES = _assume("planner.library_bytes", 0.4e9, "B", "buffers of NCCL's channels", low=0.2e9, high=1e9)
"""Beside what the allocator counts."""

CONTEXT_BYTES = _assume(
    "planner.context_bytes", 2.0 * 2**30, "B", "CUDA context, workspaces and fragments", low=1e9, high=3.5e9
)
"""What must be free beside the prediction before a plan is said to fit."""

MEMORY_MARGIN = _assume("planner.memory_margin", 1.07, "1", "largest error of peak memory on published rows")

SCORE_BYTES = _assume(
    "planner.score_bytes", 10.0, "B", "scale, mask, softmax and dropout of Megatron-LM's unfused core attention",
    low=9.0, high=11.0,
)  # fmt: skip
"""Of each attention score through memory in forward, where scores leave the chip."""

BACKWARD_WINDOW = _assume(
    "planner.backward_window", 0.9, "1", "share of backward beneath which gradients can be summed", low=0.5, high=1.0
)

CONSTANTS = (LOGIT_BYTES, FUSED_LOGIT_BYTES, LIBRARY_BYTES, CONTEXT_BYTES, MEMORY_MARGIN, BACKWARD_WINDOW)
"""All of them; every prediction depends on them."""
