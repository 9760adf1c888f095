"""In which number formats a rank multiplies, moves and keeps under a precision recipe, and what its scales weigh."""

from dataclasses import dataclass
from math import prod

from plait.config.recipe import Operand
from plait.contract.op import Op
from plait.contract.quantization import What
from plait.contract.step import Gemm, Move, Step
from plait.dtype import DType, width_bytes

MASTER: DType = "float32"
"""In which the optimizer keeps weights."""

_READ: dict[str, tuple[What, What]] = {
    "forward": ("input", "weight"),
    "dgrad": ("gradient", "weight"),
    "wgrad": ("gradient", "input"),
}
LETTERS: dict[What, str] = {"input": "x", "weight": "w", "gradient": "dy"}


@dataclass(frozen=True)
class Factor:
    """What a GEMM reads: `x` in `e4m3`, with a scale for each block; without an operand as it is computed."""

    tensor: str
    format: str
    operand: Operand | None = None

    def count_bytes(self, rows: int, width: int) -> int:
        """What it weighs; scales of whole tensors do not count."""
        return rows * width * width_bytes(self.format) if self.operand is None else rows * self.operand.row_bytes(width)


@dataclass(frozen=True)
class Wire:
    """What a collective of a quantized tensor carries.

    Attributes:
        copies: one, or one for each direction in which its blocks are read.
        plain_bytes: what it would carry without a recipe.
    """

    operand: Operand
    copies: int
    number_bytes: int
    scale_bytes: int
    plain_bytes: int


def list_factors(op: Op, what: str, dtype: DType) -> tuple[Factor, Factor]:
    """What the GEMMs `what` (forward, dgrad, wgrad) of a linear read."""
    one, other = (_build_factor(op, tensor, dtype) for tensor in _READ[what])
    return one, other


def derive_accumulator(dtype: DType) -> DType:
    """In which format products of a linear are summed."""
    return "float64" if dtype == "float64" else "float32"


def count_moved_bytes(op: Op, gemm: Gemm, dtype: DType) -> int:
    """Bytes that cross memory if each operand, in its own format, and the result do so once."""
    if op.recipe is None:
        return gemm.moved_bytes(dtype)
    one, other = list_factors(op, gemm.what, dtype)
    factors = one.count_bytes(gemm.m, gemm.k) + other.count_bytes(gemm.n, gemm.k)
    return (factors + gemm.m * gemm.n * width_bytes(dtype)) * gemm.count


def derive_intensity(op: Op, gemm: Gemm, dtype: DType) -> float:
    """Arithmetic intensity in FLOP per byte; 0 where there is nothing to do."""
    moved = count_moved_bytes(op, gemm, dtype)
    return gemm.flops / moved if moved else 0.0


def derive_wire(op: Op, step: Step, dtype: DType) -> Wire | None:
    """What a quantized tensor is on its way; None for what is not quantized."""
    if op.recipe is None or not isinstance(step, Move) or step.collective.dtype != "uint8":
        return None
    tensor, operand = (op.inputs[0], op.recipe.input) if step.tensor == "x" else (op.outputs[0], op.recipe.gradient)
    rows, width = tensor.layout.shape
    copies = step.collective.shape[1] // operand.row_bytes(width)
    scales = 0 if operand.block is None else rows * copies * (width // operand.block)
    payload = step.collective.payload_bytes
    return Wire(operand, copies, payload - scales, scales, prod(tensor.layout.shape) * width_bytes(dtype))


def _build_factor(op: Op, what: What, dtype: DType) -> Factor:
    if op.recipe is None:
        return Factor(LETTERS[what], dtype)
    operand = op.recipe.operands[what]
    return Factor(LETTERS[what], operand.format, operand)
