"""AdamW over float32 masters, and the one buffer in which gradients are accumulated and reduced."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from plait.comm import collectives
from plait.comm.mesh import Axis
from plait.config.train import TrainConfig
from plait.parallel.fsdp.local import local_of
from plait.parallel.fsdp.step import StepUnits

MOMENTS = ("exp_avg", "exp_avg_sq")


class Gradients(Protocol):
    """Where the gradients of a step are added up, and how they become those of all data-parallel ranks."""

    def zero(self) -> None:
        """Begin a step."""

    def expect(self, *, is_last: bool) -> None:
        """Say whether the backward pass that follows is the last of the step."""

    def all_reduce(self, axis: Axis) -> None:
        """Sum over the data-parallel ranks, once a step; where backward has done that already, do nothing."""

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""


class FlatGradients:
    """Float32 gradients of all parameters, views of one flat tensor; float64 where that is asked for.

    autograd adds the gradients of every micro-batch up in it, in float32 also where it computes in bfloat16. One
    collective over the flat tensor reduces all of them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype = torch.float32) -> None:
        params = list(parameters.values())
        self.flat = torch.zeros(sum(p.numel() for p in params), dtype=dtype, device=params[0].device)
        for param, view in zip(params, self.flat.split([p.numel() for p in params]), strict=True):
            param.grad_dtype = dtype
            param.grad = view.view(param.shape)

    def zero(self) -> None:
        """Begin a step."""
        self.flat.zero_()

    def expect(self, *, is_last: bool) -> None:
        """Every pass is alike."""

    def all_reduce(self, axis: Axis) -> None:
        """Sum over the data-parallel ranks: one collective, nothing at degree 1."""
        if axis.degree > 1:
            self.flat.copy_(collectives.all_reduce(self.flat, axis, label="gradients"))

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        self.flat.mul_(factor)


class ShardedGradients:
    """Gradients that FSDP has summed and cut: the shards of this rank, in the format of the masters.

    Before the last micro-batch of a step nothing is summed: until then a rank keeps gradients of all that tp left it.
    """

    def __init__(self, model: FSDPModule, parameters: Mapping[str, nn.Parameter]) -> None:
        assert isinstance(model, nn.Module)
        self._units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        self._parameters = tuple(parameters.values())

    def zero(self) -> None:
        """Begin a step."""
        for param in self._parameters:
            param.grad = None

    def expect(self, *, is_last: bool) -> None:
        """Sum in the last pass."""
        for unit in self._units:
            unit.set_requires_gradient_sync(is_last, recurse=False)

    def all_reduce(self, axis: Axis) -> None:
        """Nothing is left to do."""

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        torch._foreach_mul_([local_of(param.grad) for param in self._parameters if param.grad is not None], factor)


class StepGradients(ShardedGradients):
    """Gradients that FSDP sums and cuts once a step, after all passes: those of a pipeline's stages."""

    def __init__(self, model: FSDPModule, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(model, parameters)
        self._step_units = StepUnits(model)

    def zero(self) -> None:
        """Begin a step: gather the parameters of all passes."""
        super().zero()
        self._step_units.gather()

    def expect(self, *, is_last: bool) -> None:
        """Every pass is alike."""

    def all_reduce(self, axis: Axis) -> None:
        """Sum over the data-parallel ranks, unit by unit."""
        self._step_units.reduce()


class AdamW:
    """AdamW that updates float32 masters and rounds them into the parameters.

    Where the parameters are float32, or float64 in a verification, they are their own masters; so are those that FSDP
    has cut, of which these are the local parts. Biases and norm weights, everything of one dim, do not decay.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], compute: torch.dtype, config: TrainConfig) -> None:
        self.parameters = dict(parameters)
        self.masters: dict[str, Tensor] = {}
        for name, param in self.parameters.items():
            own = local_of(param)
            if own is not param or compute in (torch.float32, torch.float64):
                self.masters[name] = own
            else:
                self.masters[name] = param.detach().float()
            if own is param:
                param.data = param.data.to(compute)
        decayed = [master for master in self.masters.values() if master.dim() > 1]
        others = [master for master in self.masters.values() if master.dim() <= 1]
        self._adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for master in self.masters.values():
            moments = {kind: torch.zeros_like(master.detach()) for kind in MOMENTS}
            self._adam.state[master] = {"step": torch.zeros((), device=master.device), **moments}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply the gradients, which are averaged and clipped already."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        gradients = self.list_gradients()
        for name, master in self.masters.items():
            master.grad = gradients.get(name)
        self._adam.step()
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.grad = None  # else it would be there beside the next one, until that is complete
        self.apply_masters()

    @torch.no_grad()
    def apply_masters(self) -> None:
        """Round the masters into the parameters."""
        for name, param in self.parameters.items():
            if local_of(param) is not self.masters[name]:
                param.copy_(self.masters[name])

    def list_gradients(self) -> dict[str, Tensor]:
        """This rank's part of the gradient of every parameter that has one."""
        return {name: local_of(param.grad) for name, param in self.parameters.items() if param.grad is not None}

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        """Kind, parameter name and tensor of each moment."""
        for name, master in self.masters.items():
            for kind in MOMENTS:
                yield kind, name, self._adam.state[master][kind]

    def resume_at(self, step: int) -> None:
        """Count `step` steps as done, for the bias correction of the moments."""
        for state in self._adam.state.values():
            state["step"].fill_(step)
