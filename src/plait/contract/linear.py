"""Column- and row-parallel linears: `y = x @ w.T + b` with the weight `[out, in]` cut along out or along in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.contract.op import Op, Saved
from plait.contract.parameter import Parameter
from plait.contract.setting import Setting, Tensor
from plait.contract.step import Gemm, Move, derive_moves, derive_replica_sum
from plait.sharding import Ownership, Partial, Placement, Replicate, Shard, Split, derive_transition


@dataclass(frozen=True)
class LinearParameters:
    """Weight `[out, in]` and bias `[out]` of linear `module`; a tied weight bears another module's name."""

    module: str
    weight: Parameter
    bias: Parameter | None = None

    @property
    def both(self) -> tuple[Parameter, ...]:
        """The parameters there are."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def cut(self) -> Split:
        """How the weight is cut."""
        split = self.weight.ownership.split
        assert split is not None, self.weight.ownership
        return split


def build_linear_parameters(ownership: Mapping[str, Ownership], module: str, dims: tuple[str, str]) -> LinearParameters:
    """Look the parameters of `module` up; `dims` are the letters of its weight."""
    bias = ownership.get(f"{module}.bias")
    weight = Parameter(ownership[f"{module}.weight"], dims)
    return LinearParameters(module, weight, None if bias is None else Parameter(bias, dims[:1]))


def derive_column_group(
    setting: Setting,
    members: Sequence[LinearParameters],
    *,
    source: Placement | None = None,
    target: Placement | None = None,
) -> Op:
    """Linears that read the same `x`, each with its output features cut: one gather forward, one reduction backward.

    The gathered input is not kept: only what the rank held of it is saved, and it is gathered again in backward.
    `source` is the state in which `x` arrives (default: that of activations), `target` the one in which `y` leaves
    (default `Shard(1)`).
    """
    T, rank = setting.num_tokens, setting.rank
    width, feature = members[0].weight.ownership.shape[1], members[0].weight.dims[1]
    entry = derive_transition(source or setting.activation, Replicate())
    leave = derive_transition(Shard(1), target or Shard(1))
    x = setting.build_tensor("x", feature, width, entry.source)
    outputs = tuple(_build_output(setting, member, leave.target) for member in members)
    gather = derive_moves(setting, "x", entry, x)
    sizes = [(member.module, member.cut.lengths[rank]) for member in members]
    return Op(
        name=_join_names([member.module for member in members]),
        inputs=(x,),
        outputs=outputs,
        parameters=tuple(parameter for member in members for parameter in member.both),
        forward=(
            *gather,
            *(Gemm(module, "forward", T, width, out) for module, out in sizes),
            *(move for y in outputs for move in derive_moves(setting, "y", leave, y)),
        ),
        backward=(
            *(move for y in outputs for move in derive_moves(setting, "dy", leave.conjugate, y)),
            *gather,
            *(Gemm(module, "dgrad", T, out, width) for module, out in sizes),
            *derive_moves(setting, "dx", entry.conjugate, x),
            *(Gemm(module, "wgrad", out, T, width) for module, out in sizes),
            *(move for member in members for move in _derive_replica_sums(setting, member)),
        ),
        saved=(Saved("x", x.layout.local_shape(rank), setting.dtype),),
    )


def derive_row(
    setting: Setting,
    linear: LinearParameters,
    *,
    source: Placement | None = None,
    target: Placement | None = None,
) -> Op:
    """Linear with its input features cut, so that each rank has an addend of `y`; the bias is added after the sum.

    `source` is the state in which `x` arrives (default `Shard(1)`), `target` the one in which `y` leaves
    (default: that of activations).
    """
    T, module, own = setting.num_tokens, linear.module, linear.cut.lengths[setting.rank]
    (width, in_width), (out_feature, in_feature) = linear.weight.ownership.shape, linear.weight.dims
    entry = derive_transition(source or Shard(1), Shard(1))
    leave = derive_transition(Partial(), target or setting.activation)
    x = setting.build_tensor("x", in_feature, in_width, entry.source, linear.cut)
    y = setting.build_tensor("y", out_feature, width, leave.target)
    return Op(
        name=module,
        inputs=(x,),
        outputs=(y,),
        parameters=linear.both,
        forward=(
            *derive_moves(setting, "x", entry, x),
            Gemm(module, "forward", T, own, width),
            *derive_moves(setting, "y", leave, y),
        ),
        backward=(
            *derive_moves(setting, "dy", leave.conjugate, y),
            Gemm(module, "dgrad", T, width, own),
            Gemm(module, "wgrad", width, T, own),
            *derive_moves(setting, "dx", entry.conjugate, x),
        ),
        saved=(Saved("x", (T, own), setting.dtype),),
    )


def _build_output(setting: Setting, member: LinearParameters, placement: Placement) -> Tensor:
    weight = member.weight
    return setting.build_tensor("y", weight.dims[0], weight.ownership.shape[0], placement, member.cut)


def _derive_replica_sums(setting: Setting, member: LinearParameters) -> list[Move]:
    leaf = member.module.rpartition(".")[2]
    named = zip((f"d{leaf}", f"d{leaf}.bias"), member.both, strict=False)
    return [move for name, parameter in named for move in derive_replica_sum(setting, name, parameter)]


def _join_names(modules: Sequence[str]) -> str:
    """`layers.0.attention.wq`, `... wk` -> `layers.0.attention.wq|wk`."""
    first, *others = modules
    return "|".join([first, *(name.rpartition(".")[2] for name in others)])
