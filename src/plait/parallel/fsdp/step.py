"""Units that are gathered once a step, for all passes of its micro-batches, and reduced once."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class StepUnits:
    """The units of FSDP on a rank whose micro-batches are under way at once, as those of a pipeline are.

    Blocks are entered for one micro-batch while others wait to go back through them. So entering and leaving one moves
    nothing: all are whole from the first forward of a step to its last backward, as plain tensors in which autograd, or
    a schedule that splits backward, finds the parameters it has seen. Their gradients are added up, in the format of
    the masters, in memory that is there for as long.

        gather     all_gather of the parameters of each unit: what is around the blocks first, then block by block
        reduce     the other way round: reduce_scatter of its gradients; all_reduce over dp_replicate of what that left

    What moves is in `contract.axis.fsdp`.

    torch lets a unit be gathered from outside, but not reduced, nor its hooks be left out: this reaches into its state,
    as it is in the versions that pyproject.toml allows.
    """

    def __init__(self, model: FSDPModule) -> None:
        assert isinstance(model, nn.Module)
        self._root = model._get_fsdp_state()
        self._units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        for unit in self._units:
            state = unit._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()

    @torch.no_grad()
    def gather(self) -> None:
        """Make every parameter whole, with a gradient of zeros."""
        self._root._lazy_init()
        for unit in self._units:
            unit.unshard()
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for each in group.fsdp_params:
                    param = each.unsharded_param
                    param.grad_dtype = group._reduce_dtype
                    param.grad = torch.zeros_like(param, dtype=group._reduce_dtype)

    def reduce(self) -> None:
        """Sum the gradients over all ranks, and leave of them, and of the parameters, what this rank keeps."""
        for unit in reversed(self._units):
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                group.post_backward()
        # The streams of what was moved are waited for here, where it ends a backward pass otherwise.
        self._root._root_post_backward_final_callback()
