"""Making the blocks of a parallel model, and what is around them, units of FSDP."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from plait.comm.mesh import Mesh
from plait.parallel.apply import record_of
from plait.parallel.fsdp.moves import GatherParameters, ScatterGradients, SumOverReplicas


def apply_fsdp(model: nn.Module, mesh: Mesh, *, compute: torch.dtype, reshard_after_forward: bool) -> None:
    """Share out the parameters of a parallel model over `dp_shard` (and cp): each block a unit, the rest another.

    Every rank keeps its part of dim 0 of its local parameters, cut as `torch.chunk` cuts, as a DTensor in the format of
    the masters. A unit is gathered in `compute` when it is entered, and freed when it is left; with
    `reshard_after_forward` also between forward and backward, but for the unit around the blocks. Its gradients are
    summed over dp_shard and cp when backward leaves it, then over dp_replicate.

    A model on the meta device is given memory here, unit by unit, so that the whole of it never exists; the values are
    anything until something sets them.

        forward    all_gather of the parameters of each unit
        backward   the same again with `reshard_after_forward`; reduce_scatter of its gradients; all_reduce over
                   dp_replicate of what that left

    What moves is in `contract.axis.fsdp`.
    """
    record = record_of(model)
    assert record is not None, "apply_fsdp takes a model that parallelize has made"
    made: dict[nn.Parameter, nn.Parameter] = {}
    units = [*list_blocks(model), model]
    device_mesh = mesh.device_mesh(("dp_shard_cp",))
    masters = next(param.dtype for param in model.parameters() if param.requires_grad)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=masters, cast_forward_inputs=False)
    for unit in units:
        _materialize(unit, mesh.device, made)
        fully_shard(
            unit, mesh=device_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward and unit is not model
        )
        assert isinstance(unit, FSDPModule), type(unit)
        _route(unit, mesh)
    record.sharded_over = mesh.dp_shard_cp


def list_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules: the layers of a transformer, whatever they are called."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield from list_blocks(child)


def _route(unit: FSDPModule, mesh: Mesh) -> None:
    """Let `plait.comm` move what it moves, and sum, not average."""
    unit.set_custom_all_gather(GatherParameters(mesh.dp_shard_cp))
    unit.set_custom_reduce_scatter(ScatterGradients(mesh.dp_shard_cp))
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    if mesh.dp_replicate.degree > 1:
        unit.set_all_reduce_hook(SumOverReplicas(mesh.dp_replicate))


def _materialize(unit: nn.Module, device: torch.device, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Memory for what is on the meta device; what was one parameter under two names stays one."""
    for module in unit.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                if param not in made:
                    made[param] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
                module._parameters[name] = made[param]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
