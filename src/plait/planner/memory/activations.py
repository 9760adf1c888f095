"""What blocks, ends and running layers keep, read from the contract's `saved` and `moves`."""

from dataclasses import replace
from math import prod

from plait.contract.model import ModelContract
from plait.contract.op import Op, Saved
from plait.contract.setting import Tensor
from plait.contract.step import list_moves
from plait.dtype import width_bytes
from plait.planner.assumed import LOGIT_BYTES
from plait.planner.plan_config import PlanConfig
from plait.planner.planned import is_attention, is_linear
from plait.planner.stages import Stage


def derive_block_bytes(contract: ModelContract, plan: PlanConfig) -> float:
    """What one block keeps of one micro-batch."""
    if plan.recompute == "full":
        return float(contract.block[0].saved[0].num_bytes)
    return sum(_keep_bytes(saved, op, contract, plan) for op in contract.block for saved in op.saved)


def _keep_bytes(saved: Saved, op: Op, contract: ModelContract, plan: PlanConfig) -> float:
    is_core = is_attention(op) and saved.name not in {tensor.name for tensor in op.inputs}
    if is_core and plan.recompute == "selective":
        return 0.0
    if is_linear(op) and plan.quantization != "none":
        return float(prod(saved.shape))
    return float(saved.num_bytes)


def derive_ends_bytes(contract: ModelContract, stage: Stage) -> float:
    """What embedding, final norm, head and loss keep; the last stage does backward at once, so of one micro-batch."""
    first = stage.micro_batches * sum(op.saved_bytes for op in contract.entry) if stage.is_first else 0.0
    if not stage.is_last:
        return first
    return first + sum(op.saved_bytes for op in contract.exit) + _count_logits(contract) * LOGIT_BYTES.value


def derive_buffer_bytes(contract: ModelContract, plan: PlanConfig, stage: Stage) -> float:
    """What a layer needs for as long as it runs.

    What moves in pieces has a place of its own for each GEMM beside it; else one tensor is gathered and one summed at
    a time. Gradients of a block's widest operation are alive with it, and what is computed again; but the last stage
    has its logits at another time.
    """
    moves = [move for op in contract.block for move in list_moves((*op.forward, *op.backward))]
    payloads = [move.collective.payload_bytes for move in moves]
    is_piecewise = plan.overlap.policy != "disabled" and plan.overlap.method not in ("none", "bulk")
    moving = sum(payloads) if is_piecewise else 2 * max(payloads, default=0)
    again = derive_block_bytes(contract, replace(plan, recompute="none")) - derive_block_bytes(contract, plan)
    running = max(_size(op, contract) for op in contract.block) + again
    logits = _count_logits(contract) * LOGIT_BYTES.value if stage.is_last else 0.0
    return moving + max(0.0, running - logits)


def _size(op: Op, contract: ModelContract) -> float:
    """Bytes of what an operation reads and writes on this rank."""
    return sum(_count(tensor, contract) for tensor in (*op.inputs, *op.outputs)) * width_bytes(contract.setting.dtype)


def _count(tensor: Tensor, contract: ModelContract) -> int:
    return prod(tensor.layout.local_shape(contract.setting.rank))


def _count_logits(contract: ModelContract) -> int:
    return _count(contract.loss.inputs[0], contract)
