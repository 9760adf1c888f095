"""Every parallel linear region of a model on small integers: sums are exact in any order, so results must be equal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.config.run import RunConfig
from plait.contract.model import derive_plan
from plait.contract.plan import Column, Row, VocabEmbedding, VocabHead
from plait.contract.quantization import find_block
from plait.models.registry import build_model
from plait.parallel import rng
from plait.parallel.apply import mesh_of, ownership_of
from plait.parallel.gather_group import GatherGroup
from plait.parallel.linear import ColumnParallelLinear, run_column_group
from plait.parallel.match import canonical_names, list_gather_groups, match_roles
from plait.parallel.region.column import ColumnGroup
from plait.parallel.tokens import enter_tokens
from plait.sharding import Ownership, Split
from plait.verify.runtime.recipe import find_quantized_block

_LARGEST = 4
"""Integers up to 4: a sum of a million products stays below 2**24, up to which float32 holds every integer."""


@dataclass(frozen=True)
class Region:
    """Modules between two boundaries: the members of a gather group, or one column, row, head or embedding."""

    role: type
    members: tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """A rank's own part of one tensor of a region, with who owns what of it."""

    ownership: Ownership
    tensor: Tensor


def list_regions(config: RunConfig) -> list[Region]:
    """The regions of one block, the first that is quantized if any is, and of the two ends; other blocks are alike."""
    block = find_quantized_block(config)
    model = build_model(config.model.model_copy(update={"num_layers": block + 1}), device="meta")
    plan = derive_plan(config.model, quantization=config.quantization)
    roles = {name: role for name, role in match_roles(model, plan).items() if find_block(name) in (None, block)}
    regions = [Region(Column, tuple(names)) for names in list_gather_groups(roles, plan).values()]
    grouped = {name for region in regions for name in region.members}
    linear = (Column, Row, VocabHead, VocabEmbedding)
    return regions + [
        Region(type(role), (name,)) for name, role in roles.items() if name not in grouped and isinstance(role, linear)
    ]


def run_regions(model: nn.Module, config: RunConfig, tokens_T: Tensor) -> Iterator[Piece]:
    """Run each region of a model, sharded or not, forward and backward: y, dx and the gradient of every parameter.

    Overwrites the weights of the regions.
    """
    bench = _Bench(model, config)
    for region in list_regions(config):
        yield from bench.run(region, tokens_T)


class _Bench:
    """Feeds regions of one model with integers that are functions of the tensor's name and the global index."""

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self.model = model
        self.modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
        self.seed = config.seed
        self.num_tokens = config.tokens_per_micro_batch
        self.names, self.ownership = canonical_names(model), ownership_of(model)
        mesh = mesh_of(model)
        self.rank = 0 if mesh is None else mesh.tp.rank
        self.tokens: Split | None = None
        if mesh is not None and config.parallel.sequence_parallel:
            self.tokens = enter_tokens(self.num_tokens, mesh)

    def run(self, region: Region, tokens_T: Tensor) -> Iterator[Piece]:
        """One region, where this rank has it."""
        if any(member not in self.modules for member in region.members):
            return
        modules = [self.model.get_submodule(member) for member in region.members]
        params = self._parameters(region)
        for name, param in params.items():
            self._fill(param.detach(), self.ownership[name])
            param.grad = None
        x = None if region.role is VocabEmbedding else self._draw(self._derive_input(region)).requires_grad_()
        outputs = _run_modules(modules, tokens_T if x is None else x)
        owners = [self._derive_output(region, member) for member in region.members]
        torch.autograd.backward(outputs, [self._draw(owner) * self._share(owner) for owner in owners])

        yield from map(Piece, owners, outputs)
        if x is not None:
            yield Piece(self._derive_input(region), _require_grad(x, region))
        for name, param in params.items():
            own = self.ownership[name]
            named = Ownership(f"grad of {name} in {region.members[0]}", own.shape, own.dim, own.split)
            yield Piece(named, _require_grad(param, region))

    def _parameters(self, region: Region) -> dict[str, Tensor]:
        names = [f"{member}.{kind}" for member in region.members for kind in ("weight", "bias")]
        return {self.names[name]: self.model.get_parameter(name) for name in names if name in self.names}

    def _derive_input(self, region: Region) -> Ownership:
        weight = self._weight(region.members[0])
        cut = (1, weight.split) if region.role is Row else (0, self.tokens)
        return _own(f"grad of x of {region.members[0]}", (self.num_tokens, weight.shape[1]), *cut)

    def _derive_output(self, region: Region, member: str) -> Ownership:
        weight = self._weight(member)
        features = weight.shape[1 if region.role is VocabEmbedding else 0]
        is_column = region.role in (Column, VocabHead)
        cut = (1, weight.split) if is_column else (0, self.tokens)
        return _own(f"y of {member}", (self.num_tokens, features), *cut)

    def _weight(self, member: str) -> Ownership:
        return self.ownership[self.names[f"{member}.weight"]]

    def _share(self, ownership: Ownership) -> int:
        """Factors of a gradient that are unlike on the ranks holding a replica and add up to one: they are addends."""
        replicas = (self.rank,) if ownership.split is None else ownership.split.replicas(self.rank)
        return len(replicas) if self.rank == replicas[0] else -1

    def _draw(self, ownership: Ownership) -> Tensor:
        dtype = next(self.model.parameters()).dtype
        return self._fill(torch.empty(ownership.local_shape(self.rank), dtype=dtype), ownership)

    def _fill(self, tensor: Tensor, ownership: Ownership) -> Tensor:
        # In float32 whatever the tensor is: a number just below 1.5 is 1 in float64, but 2 once rounded to float32.
        drawn = torch.empty(tensor.shape)
        key = rng.derive_key(self.seed, "integers", ownership.name)
        edge = _LARGEST + 0.4
        rng.uniform_(drawn, key, ownership.intervals(self.rank), ownership.shape, low=-edge, high=edge)
        return tensor.copy_(drawn.round_())


def _run_modules(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    columns = [module for module in modules if isinstance(module, ColumnParallelLinear)]
    if columns:
        shared = columns[0].group
        entry = shared.group.entry if isinstance(shared, GatherGroup) else columns[0].alone.entry
        group = ColumnGroup(entry, tuple(column.shared_over for column in columns))
        return list(run_column_group(x, group, columns).members)
    return [module(x) for module in modules]


def _own(name: str, shape: tuple[int, ...], dim: int, split: Split | None) -> Ownership:
    return Ownership(name, shape) if split is None else Ownership(name, shape, dim, split)


def _require_grad(tensor: Tensor, region: Region) -> Tensor:
    assert tensor.grad is not None, region
    return tensor.grad
