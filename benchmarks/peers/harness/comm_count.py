"""Counts the torch.distributed collectives of one step: {"all_reduce": [calls, MiB], ...}.

MiB is the whole tensor per call: the reduced one, the gathered result, the scattered input.
Works for eager c10d calls and for the functional collectives under DTensor.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "send",
    "recv_": "recv",
}


def _nbytes(arg) -> int:
    if isinstance(arg, torch.Tensor):
        return arg.numel() * arg.element_size()
    if isinstance(arg, (list, tuple)):
        return sum(_nbytes(a) for a in arg)
    return 0


class CommCount(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts: dict[str, list[float]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.distributed.tensor import DTensor

        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let DTensor unwrap first; its local ops come back here
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            op = func._schema.name.split("::")[1]
            if op in NAMES:
                entry = self.counts.setdefault(NAMES[op], [0, 0.0])
                entry[0] += 1
                entry[1] += max(_nbytes(a) for a in (*args, out)) / 2**20
        return out


def count(step) -> dict[str, list[float]]:
    with CommCount() as counter:
        step()
    return counter.counts
