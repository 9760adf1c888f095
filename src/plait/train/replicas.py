"""Ranks that must hold the same do: configs, batches and replicated parameters are checked, gradients made so."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.comm import collectives
from plait.comm.agree import share
from plait.comm.mesh import Axis, Mesh
from plait.config.run import AnyRun
from plait.contract.axis.replicas import COMMUTES
from plait.errors import ConfigError, ContractError
from plait.parallel.apply import ownership_of, record_of, tied_in
from plait.parallel.fsdp.local import count_share, local_of
from plait.sharding import Ownership
from plait.train.corpus.windows import MicroBatch

_WEIGHT = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, so that a change of any one element changes the hash."""

_HASHED_AT_ONCE = 1 << 22
"""Elements: each becomes three numbers of 8 bytes, for which a device that is full has no room for all of a table."""


def check_same_config(run: AnyRun, mesh: Mesh) -> None:
    """Check that every rank was started with the same config.

    Raises:
        ConfigError: on every rank, naming those that differ from rank 0, and in what.
    """
    configs = share(run.model_dump(mode="json"), mesh)
    differing = [rank for rank, config in enumerate(configs) if config != configs[0]]
    if differing:
        keys = ", ".join(_list_differing_keys(configs[0], configs[differing[0]]))
        raise ConfigError(
            f"the config of rank {', '.join(map(str, differing))} is not that of rank 0: {keys}",
            hint="start every rank with the same config file and the same overrides",
        )


def _list_differing_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """`train.steps`, for every value that is not the same in both."""
    for key in {**one, **other}:
        ours, theirs = one.get(key), other.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from (f"{key}.{inner}" for inner in _list_differing_keys(ours, theirs))
        elif ours != theirs:
            yield f"{key} = {theirs!r}, not {ours!r}"


def check_same_batch(batches: Sequence[MicroBatch], mesh: Mesh) -> None:
    """Check that ranks that differ in no dp axis got the same tokens.

    Raises:
        ContractError: on every rank, naming the places on dp whose ranks did not.
    """
    digest = hashlib.blake2b(digest_size=16)
    for batch in batches:
        digest.update(batch.tokens.numpy().tobytes())
        digest.update(batch.targets.numpy().tobytes())
    digests = share((mesh.dp.rank, digest.hexdigest()), mesh)
    groups = {dp: {other for at, other in digests if at == dp} for dp, _ in digests}
    bad = [dp for dp, found in groups.items() if len(found) > 1]
    if bad:
        raise ContractError(
            f"the ranks of one place on dp must get the same batch, and those of dp={', '.join(map(str, bad))} did not",
            hint="check that all ranks read the same files",
        )


class ReplicaGradients:
    """The gradients of parameters that several ranks of a tp group hold, which have to stay the same on all of them.

    A library may add up what three ranks or more send in an order that depends on where in a buffer an element is, and
    on which wires the ranks are. Two groups that sum the same addends then differ in the last bit, and replicas drift
    apart. So the first of those that hold a parameter tells the others what it found.
    """

    def __init__(self, parameters: Mapping[str, Tensor], model: nn.Module, mesh: Mesh, dtype: torch.dtype) -> None:
        shared_over, ownership = _find_shared_over(model), ownership_of(model)
        summed_over = [mesh.dp_cp] if shared_over is None else [shared_over, mesh.dp_replicate]
        self._shared: list[_Shared] = []
        if max(axis.degree for axis in summed_over) <= COMMUTES:
            return
        by_axis: dict[Axis, list[Tensor]] = {mesh.tp: []}
        for name, param in parameters.items():
            axis = _find_holders(ownership[name], mesh)
            if axis is not None and axis.degree > 1:
                by_axis.setdefault(axis, []).append(param)
        for axis, params in by_axis.items():
            if not params:
                continue
            sizes = [count_share(param, shared_over) for param in params]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=mesh.device)
            self._shared.append(_Shared(axis, params, flat, sizes))

    @torch.no_grad()
    def copy_first(self) -> None:
        """Give every rank the gradients of the first, once they are summed over data-parallel ranks.

        One all_reduce over tp of all that its ranks hold whole, and one over each subgroup that shares KV heads; of
        zeros from all ranks but the first, so that the sum is exact.
        """
        for axis, params, flat, sizes in self._shared:
            flat.zero_()
            grads = [None if param.grad is None else local_of(param.grad).flatten() for param in params]
            if axis.rank == 0:
                for grad, slot in zip(grads, flat.split(sizes), strict=True):
                    if grad is not None:
                        slot[: grad.numel()] = grad
            total = collectives.all_reduce(flat, axis, dtype=flat.dtype, label="replicas")
            for grad, slot in zip(grads, total.split(sizes), strict=True):
                if grad is not None:
                    grad.copy_(slot[: grad.numel()])


class _Shared(NamedTuple):
    """What the ranks of an axis hold, and the buffer in which the gradients of that travel: so much for each."""

    axis: Axis
    params: Sequence[Tensor]
    flat: Tensor
    sizes: Sequence[int]


def _find_shared_over(model: nn.Module) -> Axis | None:
    record = record_of(model)
    return None if record is None else record.sharded_over


def _find_holders(ownership: Ownership, mesh: Mesh) -> Axis | None:
    """The axis of the tp ranks that hold the same of a parameter as this one; None where each has its own."""
    if ownership.dim is None:
        return mesh.tp
    split = ownership.split
    return mesh.build_subgroup("tp/kv", split.replica_groups) if split is not None and split.is_replicated else None


@torch.no_grad()
def check_replicas(model: nn.Module, mesh: Mesh) -> None:
    """Check that parameters held by several ranks are the same, bit for bit, on all of them.

    Over dp and cp that is every parameter, or where dp_shard shares them out, over dp_replicate; over tp those that are
    whole on every rank, and KV heads that a subgroup shares; over pp a table that the first stage and the last have. A
    hash of 64 bits a parameter is all that is compared.

    Raises:
        ContractError: on every rank, naming the parameters that drifted apart.
    """
    hashes = {name: _hash(local_of(param)) for name, param in model.named_parameters()}
    copies = mesh.dp_cp if _find_shared_over(model) is None else mesh.dp_replicate
    drifted = _find_different(list(hashes), hashes, copies)
    ownership = ownership_of(model)
    held: dict[Axis, list[str]] = {}
    for name in hashes:
        axis = _find_holders(ownership[name], mesh)
        if axis is not None:
            held.setdefault(axis, []).append(name)
    for axis, names in held.items():
        drifted += _find_different(names, hashes, axis)
    tied = tied_in(model)
    if tied is not None:
        drifted += _find_different(sorted(tied.names), hashes, tied.axis)
    found = sorted({name for names in share(drifted, mesh) for name in names})
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ContractError(
            f"replicated parameters are no longer the same on all ranks: {', '.join(found[:5])}{more}",
            hint="resume from a checkpoint; a gradient is not reduced, or a device computes wrongly",
        )


def _hash(param: Tensor) -> Tensor:
    """Sum of the bits of each element, weighted by its index; 0 where this rank has none of them."""
    width = torch.int32 if param.element_size() == 4 else torch.int16
    bits = param.detach().contiguous().view(width).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, bits.numel(), _HASHED_AT_ONCE):
        piece = bits[first : first + _HASHED_AT_ONCE]
        weights = torch.arange(2 * first + 1, 2 * (first + piece.numel()), 2, device=bits.device) * _WEIGHT
        total += (piece.to(torch.int64) * weights).sum()
    return total


def _find_different(names: list[str], hashes: dict[str, Tensor], axis: Axis) -> list[str]:
    if axis.degree == 1 or not names:
        return []
    own = torch.stack([hashes[name] for name in names])
    most, flipped_least = collectives.all_reduce(torch.stack((own, ~own)), axis, op="max", label="check_replicas")
    return [name for name, differs in zip(names, (most != ~flipped_least).tolist(), strict=True) if differs]
