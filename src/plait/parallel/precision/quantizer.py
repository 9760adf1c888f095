"""The quantizer of a boundary whose linears have a recipe: scales that are those of whole tensors, bytes that move."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.comm import collectives
from plait.comm.mesh import Axis, Mesh
from plait.contract.quantization import Orientation, list_orientations
from plait.parallel.precision.scheme import LinearScheme
from plait.parallel.region.activation import ActivationGradient
from plait.parallel.region.matrix import Factor, Matrix, QuantizedMatrix
from plait.parallel.region.quantizer import GradientReading, Needs, Reading
from plait.quant.cast import Quantized
from plait.quant.history import LinearHistory
from plait.quant.linear import check_tokens, find_kernels
from plait.quant.matmul import find_accumulator
from plait.quant.scheme import Scales, Scheme
from plait.quant.select import Gemm
from plait.sharding import Interval


@dataclass(frozen=True)
class Memory:
    """What backward has to know of forward.

    Attributes:
        x: the input as wgrad reads it, without its bytes; None where that is not wanted.
        weight_scales: of every linear.
    """

    schemes: Sequence[Scheme]
    x: Quantized | None
    weight_scales: Sequence[Scales]


@dataclass(frozen=True)
class RecipeQuantizer:
    """Quantizes what linears under one recipe read.

    Of tensors that are cut over tp the largest magnitudes are agreed on, all at once: one all_reduce of a float32
    number or two for each. Every q(...) rounds the tensor itself; a weight is quantized again for backward, to the same
    bits.

    Attributes:
        label: of the boundary, in traces.
        linears: those that read one input, or the one at the end of a region.
        history: that of the first, which notes the input of all.
        shared_over: of each linear, the axis of the ranks that hold the same KV heads, if any. What these have of its
            output's gradient are addends, and only their sum can be quantized, so that is taken first. All of them have
            then the gradient of the weight, and the first of them alone adds to that of the input.
        is_input_cut: whether a rank has a part of the input: of its tokens or features.
        is_gradient_cut: whether it has a part of the output's gradient.
        has_own_tokens: whether that part is of tokens.
    """

    mesh: Mesh
    label: str
    linears: Sequence[LinearScheme]
    history: LinearHistory | None
    shared_over: Sequence[Axis | None]
    is_input_cut: bool
    is_gradient_cut: bool
    has_own_tokens: bool

    def read(self, x: Tensor, num_rows: int, weights: Sequence[Tensor], needs: Needs) -> Reading:
        """Input and weights in rows for forward, the input in columns for backward."""
        first, *others = (linear.build(self._find_first_row()) for linear in self.linears)
        first, is_kept = replace(first, history=self.history), any(needs.weights)
        schemes = [first, *others]
        if is_kept:
            check_tokens(num_rows, first.recipe, first.name)
        x = x.flatten(0, -2)
        orientations = list_orientations(first.recipe.input, ("forward", "wgrad") if is_kept else ("forward",))
        measured = [first.measure("input", x, orientations, notes=needs.is_recorded)]
        for scheme, weight in zip(schemes, weights, strict=True):
            measured.append(scheme.measure("weight", weight, ("rows",), notes=needs.is_recorded))
        of_x, *of_weights = self._agree(measured, [self.is_input_cut, *[True] * len(weights)])
        x_scales = first.derive_scales("input", of_x, orientations)
        weight_scales = [
            scheme.derive_scales("weight", amaxes, ("rows",))
            for scheme, amaxes in zip(schemes, of_weights, strict=True)
        ]
        rows = first.quantize("input", x, ("rows",), x_scales[:1])
        columns = None
        if is_kept:
            columns = rows if len(orientations) == 1 else first.quantize("input", x, orientations[1:], x_scales[1:])
        memory = Memory(schemes, None if columns is None else _drop_bytes(columns), weight_scales)
        factors = [
            self._view(scheme.quantize("weight", weight, ("rows",), scales), weight.dtype, "forward").prepare()
            for scheme, weight, scales in zip(schemes, weights, weight_scales, strict=True)
        ]
        kept = None if columns is None else columns.payload
        return Reading(self._view(rows, x.dtype, "forward"), factors, kept, memory)

    def read_again(
        self, kept: Tensor | None, memory: Memory, weights: Sequence[Tensor], needs: Needs
    ) -> tuple[Matrix | None, Sequence[Factor]]:
        """The input that was kept, and the weights in columns."""
        dtype, x = weights[0].dtype, None
        if kept is not None and memory.x is not None:
            x = self._view(memory.x.with_payload(kept), dtype, "wgrad")
        if not needs.x:
            return x, weights
        return x, [
            self._view(scheme.quantize("weight", weight, ("columns",), scales), dtype, "dgrad").prepare()
            for scheme, weight, scales in zip(memory.schemes, weights, memory.weight_scales, strict=True)
        ]

    def read_gradients(
        self, grads: Sequence[Tensor | None], memory: Memory, needs: Needs, activation: ActivationGradient | None
    ) -> GradientReading:
        """All of them are filled first: the scale of a tensor goes by all of it."""
        if activation is not None:
            activation.fill(Interval(0, activation.grad.shape[0]))
        read = {
            index: orientations
            for index in range(len(grads))
            if (orientations := self._list_gradient_orientations(needs, index)) and grads[index] is not None
        }
        present = {
            index: self._sum_shared(grad, self.shared_over[index])
            for index, grad in enumerate(grads)
            if index in read and grad is not None
        }
        measured = {
            index: memory.schemes[index].measure("gradient", grad, read[index], notes=True)
            for index, grad in present.items()
        }
        agreed = self._agree(list(measured.values()), [self.is_gradient_cut] * len(measured))
        dgrad: list[Matrix | None] = [None] * len(grads)
        wgrad, biases = dgrad.copy(), dgrad.copy()
        for (index, grad), amaxes in zip(present.items(), agreed, strict=True):
            scheme = memory.schemes[index]
            scales = scheme.derive_scales("gradient", amaxes, read[index])
            quantized = scheme.quantize("gradient", grad, read[index], scales)
            shared = self.shared_over[index]
            biases[index] = rows = self._view(quantized, grad.dtype, "dgrad", read[index][0])
            wgrad[index] = self._view(quantized, grad.dtype, "wgrad")
            dgrad[index] = rows if shared is None or shared.rank == 0 else None
        return GradientReading(dgrad, wgrad, biases, None)

    def _list_gradient_orientations(self, needs: Needs, index: int) -> tuple[Orientation, ...]:
        """A bias sums what dgrad reads."""
        gemms = [
            *(["dgrad"] if needs.x or needs.biases[index] else []),
            *(["wgrad"] if needs.weights[index] else []),
        ]
        return list_orientations(self.linears[index].recipe.gradient, gemms)

    def _sum_shared(self, grad: Tensor, axis: Axis | None) -> Tensor:
        return grad if axis is None else collectives.all_reduce(grad, axis, label=self.label)

    def _agree(self, measured: Sequence[Tensor], is_cut: Sequence[bool]) -> list[Tensor]:
        """The largest of all ranks, of what is cut."""
        parts = [amaxes for amaxes, is_part in zip(measured, is_cut, strict=True) if is_part and amaxes.numel()]
        if not parts or self.mesh.tp.degree == 1:
            return list(measured)
        agreed = collectives.all_reduce(torch.cat(parts), self.mesh.tp, op="max", label=self.label)
        pieces = iter(agreed.split([len(amaxes) for amaxes in parts]))
        return [
            next(pieces) if is_part and amaxes.numel() else amaxes
            for amaxes, is_part in zip(measured, is_cut, strict=True)
        ]

    def _view(
        self, quantized: Quantized, dtype: torch.dtype, gemm: Gemm, orientation: Orientation | None = None
    ) -> QuantizedMatrix:
        """It as `gemm` reads it: of both ways in which it lies in blocks the last, unless another is given."""
        kernel = find_kernels(self.linears[0].recipe, quantized.payload.device, dtype)[gemm].kernel
        read = quantized.orientations[-1] if orientation is None else orientation
        return QuantizedMatrix(quantized, read, find_accumulator(dtype), kernel)

    def _find_first_row(self) -> int:
        """Of the tokens of this pass, the first whose gradient this rank has."""
        if not self.has_own_tokens or self.mesh.tokens is None:
            return 0
        return self.mesh.tokens.intervals[self.mesh.tp.rank].start


def _drop_bytes(quantized: Quantized) -> Quantized:
    return replace(quantized, payload=quantized.payload.new_empty(0))
