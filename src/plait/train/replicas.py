"""Checks that ranks which must hold the same do: configs, batches, replicated parameters."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import collectives
from plait.comm.agree import share
from plait.comm.mesh import Axis, Mesh
from plait.config.run import AnyRun
from plait.errors import ConfigError, ContractError
from plait.parallel.apply import ownership_of, tied_in
from plait.train.corpus.windows import MicroBatch

_WEIGHT = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, so that a change of any one element changes the hash."""


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


@torch.no_grad()
def check_replicas(model: nn.Module, mesh: Mesh) -> None:
    """Check that parameters held by several ranks are the same, bit for bit, on all of them.

    Over dp and cp that is every parameter; over tp those that are whole on every rank, and KV heads that a subgroup
    shares; over pp a table that the first stage and the last have. A hash of 64 bits a parameter is all that is
    compared.

    Raises:
        ContractError: on every rank, naming the parameters that drifted apart.
    """
    hashes = {name: _hash(param) for name, param in model.named_parameters()}
    drifted = _find_different(list(hashes), hashes, mesh.dp_cp)
    ownership = ownership_of(model)
    drifted += _find_different([name for name in hashes if ownership[name].dim is None], hashes, mesh.tp)
    for name in hashes:
        split = ownership[name].split
        if split is not None and split.is_replicated:
            drifted += _find_different([name], hashes, mesh.build_subgroup("tp/kv", split.replica_groups))
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
    """Sum of the bits of each element, weighted by its index."""
    width = torch.int32 if param.element_size() == 4 else torch.int16
    bits = param.detach().contiguous().view(width).flatten().to(torch.int64)
    weights = torch.arange(1, 2 * bits.numel(), 2, device=bits.device) * _WEIGHT
    return (bits * weights).sum()


def _find_different(names: list[str], hashes: dict[str, Tensor], axis: Axis) -> list[str]:
    if axis.degree == 1 or not names:
        return []
    own = torch.stack([hashes[name] for name in names])
    most, flipped_least = collectives.all_reduce(torch.stack((own, ~own)), axis, op="max", label="check_replicas")
    return [name for name, differs in zip(names, (most != ~flipped_least).tolist(), strict=True) if differs]
