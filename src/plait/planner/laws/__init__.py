"""Laws: how long one kernel or one collective takes on a device, pure functions of its constants."""

from plait.planner.laws.attention import AttentionShape, estimate_flash_attention, estimate_unfused_attention
from plait.planner.laws.collective import estimate_collective, estimate_p2p
from plait.planner.laws.estimate import Estimate, Limit
from plait.planner.laws.gemm import estimate_gemm
from plait.planner.laws.memory_bound import (
    estimate_draw,
    estimate_loss,
    estimate_memory_bound,
    estimate_optimizer,
    estimate_quantize,
)

__all__ = [
    "AttentionShape",
    "Estimate",
    "Limit",
    "estimate_collective",
    "estimate_draw",
    "estimate_flash_attention",
    "estimate_gemm",
    "estimate_loss",
    "estimate_memory_bound",
    "estimate_optimizer",
    "estimate_p2p",
    "estimate_quantize",
    "estimate_unfused_attention",
]
