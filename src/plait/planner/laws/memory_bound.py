"""Kernels that wait for memory: norms, residuals, activations, quantise passes, the optimizer, the loss."""

from functools import cache
from math import hypot

from plait.planner.assumed import DRAWN_LOGIT_BYTES, LOGIT_TRAFFIC_BYTES, OPTIMIZER_TRAFFIC_BYTES
from plait.planner.hardware import Constant, Hardware
from plait.planner.laws.estimate import Estimate


def estimate_memory_bound(hardware: Hardware, num_bytes: float, *, kernels: int = 1) -> Estimate:
    """How long `kernels` kernels take that together read and write so many bytes."""
    memory = hardware.memory
    launch_s = kernels * memory.launch_s.value
    moving_s = num_bytes / memory.streamed_bytes_per_s
    return Estimate(launch_s + moving_s, *_describe(hardware), limit="latency" if launch_s > moving_s else "memory")


@cache
def _describe(hardware: Hardware) -> tuple[float, tuple[str, ...]]:
    memory = hardware.memory
    uncertainty = hypot(memory.efficiency.uncertainty, memory.bytes_per_s.uncertainty)
    return uncertainty, (memory.bytes_per_s.name, memory.efficiency.name, memory.launch_s.name)


def estimate_optimizer(hardware: Hardware, num_params: float) -> Estimate:
    """A step of AdamW over the parameters that a rank keeps the state of."""
    return _estimate_each(hardware, OPTIMIZER_TRAFFIC_BYTES, num_params)


def estimate_loss(hardware: Hardware, num_logits: float) -> Estimate:
    """Cross entropy, forward and backward, over the logits of a rank."""
    return _estimate_each(hardware, LOGIT_TRAFFIC_BYTES, num_logits, kernels=3)


def estimate_draw(hardware: Hardware, num_logits: float) -> Estimate:
    """A token drawn of each row: softmax, a cut of the least likely, a draw."""
    return _estimate_each(hardware, DRAWN_LOGIT_BYTES, num_logits, kernels=3)


def _estimate_each(hardware: Hardware, each: Constant, count: float, *, kernels: int = 1) -> Estimate:
    """So many elements, of each of which `each` bytes are read and written."""
    one = estimate_memory_bound(hardware, each.value * count, kernels=kernels)
    return Estimate(one.seconds, hypot(one.uncertainty, each.uncertainty), (*one.constants, each.name), one.limit)


def estimate_quantize(
    hardware: Hardware,
    num_elements: float,
    *,
    is_scale_known: bool = False,
    transposed: bool = False,
    element_bytes: float = 1.0,
) -> Estimate:
    """A tensor in two bytes an element, cast to `element_bytes`, those of its scales included.

    The largest value is found in a pass before unless the scale is known, from earlier steps or block by block; a copy
    is written the other way round for the GEMM that contracts the other dim where `transposed`.
    """
    num_bytes = num_elements * ((0 if is_scale_known else 2) + 2 + element_bytes * (2 if transposed else 1))
    return estimate_memory_bound(hardware, num_bytes, kernels=1 if is_scale_known else 2)
