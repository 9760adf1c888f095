"""CUDA symmetric memory: PyTorch's own fused collective GEMMs, where they fit.

They do not take steps. Each is a whole pass with a schedule of its own, which is `direct` in one chunk: the own shard
first, or last, copies on a second stream, sums in rank order. Several GEMMs may share one gather.

    column forward             all_gather_matmul(x_shard, [w.T, ...])
    row backward, dgrad        all_gather_matmul(dy_shard, [w]), whose gathered dy is then the operand of wgrad
    row forward                matmul_reduce_scatter(x, w.T)
    column backward, dgrad     matmul_reduce_scatter([dy, ...], [w; ...]), under which the library gathers x for wgrad

Their barriers have no timeout: a rank that dies leaves the kernels of the others waiting until their launcher ends
them. They have no backward, so they belong into the functions that have one.
"""

import socket
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed._symmetric_memory as symm_mem  # defines the ops, too
from torch import Tensor

from plait.comm import trace
from plait.comm.agree import share_over
from plait.comm.collectives import build_transport_error
from plait.comm.mesh import Axis
from plait.errors import ShardingError
from plait.overlap.transport.base import Capability
from plait.schedule.step import Method
from plait.schedule.work import Work
from plait.sharding import Kind

CAPABILITY = Capability("symm_mem", frozenset({"cuda"}), frozenset({Method.DIRECT}), needs_one_host=True)

_PROBE_BYTES = 1024

_found: "WeakKeyDictionary[Axis, str | None]" = WeakKeyDictionary()


def all_gather_matmul(
    x_shard: Tensor, factors: Sequence[Tensor], axis: Axis, *, needs_full: bool = True, label: str = ""
) -> tuple[Tensor | None, list[Tensor]]:
    """Gather `x_shard` and multiply the result by each of the factors; the gathered rows too, if they are needed.

        x_shard   [T/tp, K]      the same number of rows on every rank
        factors   [K, N] each
        x_full    [T, K]
        products  [T, N] each

    Raises:
        TransportError: the operation failed.
    """
    assert axis.group is not None, axis
    shape = (x_shard.shape[0] * axis.degree, x_shard.shape[1])
    trace.issue(Kind.ALL_GATHER, axis, shape, x_shard.dtype, 0, "sum", label)
    try:
        x_full, products = torch.ops.symm_mem.fused_all_gather_matmul(
            x_shard.contiguous(), list(factors), 0, axis.group.group_name, return_A=needs_full
        )
    except RuntimeError as error:
        raise build_transport_error(error) from error
    return x_full, products


def matmul_reduce_scatter(x: Tensor, factor: Tensor, axis: Axis, *, label: str = "") -> Tensor:
    """Multiply `x` by `factor` and sum the products of all ranks; every rank gets the rows that it owns.

        x         [T, K]
        factor    [K, N]
        y_shard   [T/tp, N]      the same number of rows on every rank

    Addends travel in the dtype of `x`, and their sum is rounded to it once.

    Raises:
        ShardingError: the rows cannot be cut evenly.
        TransportError: the operation failed.
    """
    assert axis.group is not None, axis
    if x.shape[0] % axis.degree:
        raise ShardingError(f"{label}: {_describe_uneven(x.shape[0], axis.degree)}")
    trace.issue(Kind.REDUCE_SCATTER, axis, (x.shape[0], factor.shape[1]), x.dtype, 0, "sum", label)
    try:
        y_shard: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x.contiguous(), factor, "sum", 0, axis.group.group_name
        )
    except RuntimeError as error:
        raise build_transport_error(error) from error
    return y_shard


def why_not(axis: Axis, device: torch.device) -> str | None:
    """Why the ranks of `axis` cannot reach each other's memory; None if they can. Every rank has to call it."""
    if axis.group is None:
        return "there is one rank"
    if device.type != "cuda":
        return f"symmetric memory is for CUDA devices, and tensors are on {device.type}"
    if axis not in _found:
        with trace.aside():
            _found[axis] = _find_obstacle(axis, device)
    return _found[axis]


def why_not_for(work: Work, dtype: torch.dtype, axis: Axis) -> str | None:
    """Why the fused operations cannot do `work` on `axis`, whatever the machine; None if they can."""
    kinds = [flow.kind for flow in work.flows]
    if Kind.ALL_REDUCE in kinds:
        return "there is no fused operation for an all-reduce"
    if not kinds:
        return "nothing moves"
    if work.rowwise is None:
        return "there is no fused operation for wgrad alone"
    if work.num_rows == 0 or not all(flow.split.is_even for flow in work.flows):
        return _describe_uneven(work.num_rows, axis.degree)
    if Kind.REDUCE_SCATTER in kinds and axis.reduce_dtype not in (None, dtype):
        asked, own = (str(each).removeprefix("torch.") for each in (axis.reduce_dtype, dtype))
        return f"addends travel in {own}, but sums are to be carried in {asked}"
    return None


def _describe_uneven(num_rows: int, degree: int) -> str:
    return f"{num_rows} rows cannot be cut into {degree} pieces of one length, as the fused operations need them"


def _find_obstacle(axis: Axis, device: torch.device) -> str | None:
    """Look for what stands in the way, in the order in which it would fail; all ranks come to one answer."""
    where = share_over((socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)), axis, device)
    hosts, devices = {host for host, _ in where}, set(where)
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts, {', '.join(sorted(hosts))}"
    if len(devices) < axis.degree:
        return f"{axis.degree} ranks share {len(devices)} devices"
    # Peers that this rank may not see (CUDA_VISIBLE_DEVICES) are left to the trial.
    own = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
    peers = [own[uuid] for _, uuid in where if uuid in own and own[uuid] != device.index]
    blind = [peer for peer in peers if not torch.cuda.can_device_access_peer(device, peer)]
    said = share_over(f"{device} cannot read the memory of cuda:{blind[0]}" if blind else None, axis, device)
    return next(filter(None, said), None) or _try_to_share(axis, device)


def _try_to_share(axis: Axis, device: torch.device) -> str | None:
    """Share a little memory as the fused operations would. A rank that fails must not leave others in the next step."""
    assert axis.group is not None, axis
    shared: Tensor | None = None
    problem = None
    try:
        shared = symm_mem.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        problem = _shorten(error)
    said = share_over(problem, axis, device)
    if shared is None or any(said):
        return f"no symmetric memory: {next(filter(None, said), '')}"
    try:
        symm_mem.rendezvous(shared, axis.group.group_name).barrier()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        problem = _shorten(error)
    said = share_over(problem, axis, device)
    return f"no symmetric memory: {next(filter(None, said))}" if any(said) else None


def _shorten(error: RuntimeError) -> str:
    """The first line: what follows is the stack of torch's own code."""
    return str(error).partition("\n")[0]
