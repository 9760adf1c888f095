"""An entered region on one rank: what reads its input beside quantized columns sees it as these do."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.parallel.precision.scheme import LinearScheme
from plait.parallel.region.arguments import Arguments, map_hidden_states
from plait.quant.matmul import find_accumulator
from plait.quant.scheme import Scheme


class LoneRegion:
    """Hands the quantized input of `parent` to all that is in it, and the input itself to the columns that quantize it.

    Over several ranks that is what is gathered; here it is what adapters read, so that they learn the same.
    """

    def __init__(self, parent: nn.Module, linears: Sequence[LinearScheme]) -> None:
        self._linear = linears[0]
        self._x: Tensor | None = None
        self._read: Tensor | None = None
        parent.register_forward_pre_hook(self._enter, with_kwargs=True)
        parent.register_forward_hook(self._leave)
        for linear in linears:
            assert linear.module is not None, linear.name
            linear.module.register_forward_pre_hook(self._hand_on)

    def _enter(self, parent: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        def read(x: Tensor) -> Tensor:
            self._x, self._read = x, _Read.apply(x, self._linear.build())
            return self._read

        return map_hidden_states(read, args, kwargs)

    def _hand_on(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._x, *args[1:]) if args and self._read is not None and args[0] is self._read else args

    def _leave(self, *_: Any) -> None:
        self._x = self._read = None


class _Read(torch.autograd.Function):
    """`x` as forward reads it, quantized; its gradient is that of what was read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scheme: Scheme) -> Tensor:
        rows = x.flatten(0, -2)
        scales = scheme.find_scales("input", rows, ("rows",), notes=False)
        numbers = scheme.quantize("input", rows, ("rows",), scales).dequantize("rows", find_accumulator(x.dtype))
        return numbers.to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
