"""What blocks, ends and running layers keep, read from the contract's `saved` and `moves`."""

from dataclasses import replace
from math import prod

from plait.contract.context.attention import ContextMethod
from plait.contract.op import Op, Saved
from plait.contract.step import list_moves
from plait.dtype import width_bytes
from plait.planner.assumed import FUSED_LOGIT_BYTES, LOGIT_BYTES
from plait.planner.plan_config import PlanConfig
from plait.planner.planned import PlannedModel, count_bytes, derive_attention, is_attention, is_linear
from plait.planner.stages import Stage


def derive_block_bytes(contract: PlannedModel, plan: PlanConfig) -> float:
    """What one block keeps of one micro-batch."""
    if plan.recompute == "full":
        return float(contract.block[0].saved[0].num_bytes)
    return sum(_keep_bytes(saved, op, contract, plan) for op in contract.block for saved in op.saved)


def _keep_bytes(saved: Saved, op: Op, contract: PlannedModel, plan: PlanConfig) -> float:
    is_core = is_attention(op) and saved.name not in {tensor.name for tensor in op.inputs}
    if is_core and plan.recompute == "selective":
        return 0.0
    if is_linear(op) and plan.quantization == "fp8_rowwise":
        return float(prod(saved.shape))
    return float(saved.num_bytes)


def derive_ends_bytes(contract: PlannedModel, plan: PlanConfig, stage: Stage) -> float:
    """What embedding, final norm, head and loss keep.

    With most schedules the last stage goes back at once, so it keeps that of one micro-batch; of others it keeps what
    the loss has saved, and the gradient of the logits where that of the head's weights is still to come.
    """
    first = stage.in_flight * sum(op.saved_bytes for op in contract.entry) if stage.is_first else 0.0
    if not stage.is_last:
        return first
    saved = sum(op.saved_bytes for op in contract.exit)
    gradient = contract.num_logits * width_bytes(plan.precision.compute) if stage.halves else 0
    waiting = (stage.ends_in_flight - 1) * (saved + contract.loss.saved_bytes + gradient)
    return first + saved + derive_logit_bytes(contract, plan) + waiting


def derive_moving_bytes(contract: PlannedModel, plan: PlanConfig) -> float:
    """Where tensors that move are kept: one that is gathered and one that is summed, or one for each GEMM.

    What moves in pieces has a place of its own for each GEMM beside it.
    """
    moves = [move for op in contract.block for move in list_moves((*op.forward, *op.backward))]
    payloads = [move.collective.payload_bytes for move in moves]
    is_piecewise = plan.overlap.policy != "disabled" and plan.overlap.method not in ("none", "bulk")
    return sum(payloads) if is_piecewise else 2 * max(payloads, default=0)


def derive_running_bytes(contract: PlannedModel, plan: PlanConfig) -> float:
    """What is alive in the backward of one block: gradients of its widest operation, what is computed again, and what
    attention has of other context ranks.
    """
    again = derive_block_bytes(contract, replace(plan, recompute="none")) - derive_block_bytes(contract, plan)
    widest = max(count_bytes((*op.inputs, *op.outputs), contract) for op in contract.block)
    return widest + again + derive_met_bytes(contract, plan)


def derive_logit_bytes(contract: PlannedModel, plan: PlanConfig) -> float:
    """What the loss needs at its peak; blocks run at another time."""
    return contract.num_logits * (FUSED_LOGIT_BYTES if plan.loss == "fused" else LOGIT_BYTES).value


def derive_half_bytes(contract: PlannedModel) -> float:
    """What a block keeps beside that until gradients of weights are computed: the gradients of its linears' outputs."""
    return float(sum(count_bytes(op.outputs, contract) for op in contract.block if is_linear(op)))


def derive_met_bytes(contract: PlannedModel, plan: PlanConfig) -> float:
    """Room for what is of other ranks while one attention runs: blocks of a ring, or all keys and values."""
    if plan.cp == 1:
        return 0.0
    core = next(op for op in contract.block if op.is_attention)
    size = derive_attention(core, contract)
    own = 2 * contract.setting.num_tokens * size.num_kv_heads * size.head_width
    kept = own * (width_bytes(size.dtype) + width_bytes(size.sum_dtype))
    match ContextMethod(plan.context_method):
        case ContextMethod.RING:
            return float(2 * kept)
        case ContextMethod.ALL_GATHER:
            return float(plan.cp * kept)
        case ContextMethod.ALL_TO_ALL:
            # Queries, keys and values packed to be sent, and as they come.
            queries = contract.setting.num_tokens * size.num_heads * size.head_width
            return float(2 * (queries + own) * width_bytes(size.dtype))
