"""Modules that treat every token alone (norms, position embeddings), on this rank's tokens."""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plait.comm import collectives
from plait.comm.autograd.compiled import Use, use_on_own_tokens
from plait.comm.mesh import Axis, Mesh
from plait.errors import ShardingError
from plait.parallel.region.arguments import map_first_tensor
from plait.parallel.tokens import check_own_tokens, current_tokens


class UseOnOwnTokens(torch.autograd.Function):
    """Hand whole parameters to a computation on own tokens; their gradients are addends, summed in one all-reduce."""

    @staticmethod
    def forward(ctx: Any, use: Use, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.use = use
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.use.sum_gradients(grads))


class _Whole(nn.Module):
    """A module inside another that lends it its parameters, which every rank holds, for its own part of the work.

    Parameters and buffers keep their names: `norm.weight` stays `norm.weight`.
    """

    def __init__(self, module: nn.Module, *, axis: Axis, name: str) -> None:
        super().__init__()
        # In a tuple, so that what it holds is registered here only and under its own names.
        self._module = (module,)
        for param_name, param in module.named_parameters(recurse=False):
            self.register_parameter(param_name, param)
        for buffer_name, buffer in module.named_buffers(recurse=False):
            is_persistent = buffer_name not in module._non_persistent_buffers_set
            self.register_buffer(buffer_name, buffer, persistent=is_persistent)
        module._buffers = self._buffers
        self.use = Use(axis, name)

    def lend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module; the gradients of its parameters are summed over the axis."""
        params = {name: param for name, param in self._parameters.items() if param is not None}
        module = self._module[0]
        if torch.compiler.is_compiling():
            copies = use_on_own_tokens(list(params.values()), self.use.handle)
            return functional_call(module, dict(zip(params, copies, strict=True)), args, kwargs)
        used = dict(zip(params, UseOnOwnTokens.apply(self.use, *params.values()), strict=True))
        # As functional_call does it, which takes 50 us more.
        lent = vars(module)
        own = lent["_parameters"]
        lent["_parameters"] = {**own, **used}
        try:
            return module(*args, **kwargs)
        finally:
            lent["_parameters"] = own

    def train(self, mode: bool = True) -> Self:
        """Put the module inside into the same mode."""
        self._module[0].train(mode)
        return super().train(mode)

    def extra_repr(self) -> str:
        """The module inside."""
        return repr(self._module[0])


class TokenLocalModule(_Whole):
    """A module with whole parameters that is given this rank's tokens.

        x_shard    [T/tp, D] -> the same
        weight     [D]          whole on every rank

        forward    nothing moves
        backward   one all_reduce over tp of all its parameters' gradients

    Contract: `contract.norm.derive_norm`.
    """

    def __init__(self, module: nn.Module, *, mesh: Mesh, name: str) -> None:
        super().__init__(module, axis=mesh.tp, name=name)
        self.mesh = mesh
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on own tokens, the first tensor it is called with."""
        return self.lend(*map_first_tensor(self._own, args, kwargs))

    def _own(self, x: Tensor) -> Tensor:
        check_own_tokens(x, self.mesh, self.name)
        return x


class RegionModule(_Whole):
    """A module with whole parameters inside a region, where each rank works on its own heads or has its own addends.

    x          any          whole, as a `Replicate`, or own heads (`[B, S, N/tp, H]`) -> the same
    weight     any          whole on every rank

    forward    nothing moves
    backward   one all_reduce over tp of all its parameters' gradients
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.lend(args, kwargs)


class TokenLocalEmbedding(TokenLocalModule):
    """A whole embedding table looked up for own tokens, given all ids: `[T]` -> `[T/tp, D]` (learned positions)."""

    def _own(self, x: Tensor) -> Tensor:
        split = current_tokens(self.mesh, self.name)
        if x.numel() != split.size:
            raise ShardingError(
                f"{self.name}: {x.numel()} ids for {split.size} tokens, so they cannot be cut with them",
                hint="give one id per token of the batch: positions.repeat(batch_size)",
            )
        return collectives.take_own(x.flatten(), self.mesh.tp, split)
