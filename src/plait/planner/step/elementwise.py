"""What the contract does not list, since nothing is multiplied or moved: kernels that read and write activations.

Which tensors there are and how much of them a rank has is read from the contract's layouts; how often each goes
through memory is stated here, for kernels that are fused as in Megatron-LM:

    norm          reads x, writes y; backward reads x and dy, writes dx
    residual      adds a branch to the stream, with its bias and dropout; backward adds two gradients
    dropout       its mask, one byte an element, beside the residual; backward a kernel of its own
    rotary        queries and keys read and written
    activation    inputs read, output written; backward reads both and writes the gradients of the inputs
"""

from plait.config.model import LlamaConfig
from plait.contract.op import Op
from plait.planner.cost import Cost
from plait.planner.planned import count_bytes, is_attention, is_linear
from plait.planner.step.circumstance import Circumstance
from plait.planner.step.linear import Direction


def build_elementwise(op: Op, direction: Direction, where: Circumstance) -> list[Cost]:
    """Kernels that belong to an operation: its own, or those that follow it."""
    backward = direction == "backward"
    ins, outs = count_bytes(op.inputs, where.contract), count_bytes(op.outputs, where.contract)
    if is_attention(op):
        is_rotated = isinstance(where.contract.config, LlamaConfig)
        rotated = 2 * count_bytes(op.inputs[:2], where.contract)
        return [where.build_kernel("rotary", rotated, kernels=2)] if is_rotated else []
    if is_linear(op):
        is_branch = op.parameters[0].ownership.dim == 1
        return [where.build_kernel("residual", 3 * outs)] if is_branch else []
    if op.saved and op.saved[0].name == "mask":
        mask = op.saved_bytes
        return [where.build_kernel("dropout", 2 * outs + mask if backward else mask, kernels=1 if backward else 0)]
    name = "norm" if op.parameters else "activation"
    return [where.build_kernel(name, (2 * ins + outs) if backward else ins + outs)]
