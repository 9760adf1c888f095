"""Column- and row-parallel linears: `y = x @ w.T + b` with the weight `[out, in]` cut along out or along in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.config.recipe import Recipe
from plait.contract.collective import Collective
from plait.contract.op import Op, Saved
from plait.contract.parameter import Parameter
from plait.contract.quantization import What, count_amaxes, count_row_bytes
from plait.contract.setting import Setting, Tensor
from plait.contract.step import REDUCE, Gemm, Move, derive_moves, derive_replica_sum
from plait.sharding import Ownership, Partial, Placement, Replicate, Shard, Split, Transition, derive_transition

AMAX = "amax"
"""What a reduction of largest magnitudes is said to carry."""


@dataclass(frozen=True)
class LinearParameters:
    """Weight `[out, in]` and bias `[out]` of linear `module`; a tied weight bears another module's name."""

    module: str
    weight: Parameter
    bias: Parameter | None = None
    recipe: Recipe | None = None
    """How it is quantized, if it is."""

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


def build_linear_parameters(
    ownership: Mapping[str, Ownership], recipes: Mapping[str, Recipe], module: str, dims: tuple[str, str]
) -> LinearParameters:
    """Look the parameters of `module` and its recipe up; `dims` are the letters of its weight."""
    bias = ownership.get(f"{module}.bias")
    weight = Parameter(ownership[f"{module}.weight"], dims)
    return LinearParameters(module, weight, None if bias is None else Parameter(bias, dims[:1]), recipes.get(module))


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

    Under a recipe the largest magnitudes of what is cut are agreed on first, what is gathered are bytes, and bytes are
    kept, as wgrad reads them. Ranks that share KV heads then sum the gradients of their outputs, which can only be
    quantized when they are whole, and have no addends of those of parameters.
    """
    T, rank = setting.num_tokens, setting.rank
    width, feature = members[0].weight.ownership.shape[1], members[0].weight.dims[1]
    entry = derive_transition(source or setting.activation, Replicate())
    leave = derive_transition(Shard(1), target or Shard(1))
    x = setting.build_tensor("x", feature, width, entry.source)
    outputs = tuple(_build_output(setting, member, leave.target) for member in members)
    recipe, count = members[0].recipe, len(members)
    sizes = [(member.module, member.cut.lengths[rank]) for member in members]
    return Op(
        name=_join_names([member.module for member in members]),
        inputs=(x,),
        outputs=outputs,
        parameters=tuple(parameter for member in members for parameter in member.both),
        forward=(
            *_derive_amaxes(setting, recipe, {"input": int(_is_cut(x)), "weight": count}),
            *_derive_gather(setting, ("x", entry, x), recipe, "input", ("forward",)),
            *(Gemm(module, "forward", T, width, out) for module, out in sizes),
            *(move for y in outputs for move in derive_moves(setting, "y", leave, y)),
        ),
        backward=(
            *(move for y in outputs for move in derive_moves(setting, "dy", leave.conjugate, y)),
            *(move for member in members for move in _derive_addend_sums(setting, member)),
            *_derive_amaxes(setting, recipe, {"gradient": count}),
            *_derive_gather(setting, ("x", entry, x), recipe, "input", ("wgrad",)),
            *(Gemm(module, "dgrad", T, out, width) for module, out in sizes),
            *derive_moves(setting, "dx", entry.conjugate, x),
            *(Gemm(module, "wgrad", out, T, width) for module, out in sizes),
            *(move for member in members for move in _derive_replica_sums(setting, member)),
        ),
        saved=(_derive_saved(setting, x.layout.local_shape(rank), recipe),),
        recipe=recipe,
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

    Under a recipe the largest magnitudes of what is cut are agreed on first, and gathered and kept are bytes.
    """
    recipe = linear.recipe
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
            *_derive_amaxes(setting, recipe, {"input": 1, "weight": 1}),
            Gemm(module, "forward", T, own, width),
            *derive_moves(setting, "y", leave, y),
        ),
        backward=(
            *_derive_amaxes(setting, recipe, {"gradient": int(_is_cut(y))}),
            *_derive_gather(setting, ("dy", leave.conjugate, y), recipe, "gradient", ("dgrad", "wgrad")),
            Gemm(module, "dgrad", T, width, own),
            Gemm(module, "wgrad", width, T, own),
            *derive_moves(setting, "dx", entry.conjugate, x),
        ),
        saved=(_derive_saved(setting, (T, own), recipe),),
        recipe=recipe,
    )


def _build_output(setting: Setting, member: LinearParameters, placement: Placement) -> Tensor:
    weight = member.weight
    return setting.build_tensor("y", weight.dims[0], weight.ownership.shape[0], placement, member.cut)


def _is_cut(tensor: Tensor) -> bool:
    return isinstance(tensor.layout.placement, Shard)


def _derive_amaxes(setting: Setting, recipe: Recipe | None, tensors: Mapping[What, int]) -> tuple[Move, ...]:
    """The one reduction of the largest magnitudes of so many tensors of which every rank has only a part."""
    if recipe is None or setting.tp == 1:
        return ()
    number = sum(count * count_amaxes(recipe, what) for what, count in tensors.items())
    reduced = Collective(REDUCE, "tp", setting.tp, (number,), "float32", op="max")
    return (Move(AMAX, (str(number),), reduced),) if number else ()


def _derive_gather(
    setting: Setting,
    movement: tuple[str, Transition, Tensor],
    recipe: Recipe | None,
    what: What,
    gemms: Sequence[str],
) -> tuple[Move, ...]:
    """What brings a tensor together for `gemms`: quantized before, if it is, in bytes."""
    moves = derive_moves(setting, *movement)
    if recipe is None:
        return moves
    rows, width = movement[2].layout.shape
    shape = (rows, count_row_bytes(recipe.operands[what], gemms, width))
    return tuple(replace(move, collective=replace(move.collective, shape=shape, dtype="uint8")) for move in moves)


def _derive_saved(setting: Setting, shape: tuple[int, ...], recipe: Recipe | None) -> Saved:
    """The input as wgrad reads it; with its bytes only a few numbers are kept, which are not counted."""
    if recipe is None:
        return Saved("x", shape, setting.dtype)
    return Saved("x", (shape[0], count_row_bytes(recipe.input, ("wgrad",), shape[1])), "uint8")


def _derive_addend_sums(setting: Setting, member: LinearParameters) -> list[Move]:
    """The sum of what ranks that share a quantized linear have of its output's gradient, each by its own readers."""
    if member.recipe is None:
        return []
    shape = (setting.num_tokens, member.cut.lengths[setting.rank])
    return [
        replace(move, dims=("T", *move.dims[:1]), collective=replace(move.collective, shape=shape))
        for move in derive_replica_sum(setting, "dy", member.weight)
    ]


def _derive_replica_sums(setting: Setting, member: LinearParameters) -> list[Move]:
    if member.recipe is not None:
        return []
    leaf = member.module.rpartition(".")[2]
    named = zip((f"d{leaf}", f"d{leaf}.bias"), member.both, strict=False)
    return [move for name, parameter in named for move in derive_replica_sum(setting, name, parameter)]


def _join_names(modules: Sequence[str]) -> str:
    """`layers.0.attention.wq`, `... wk` -> `layers.0.attention.wq|wk`."""
    first, *others = modules
    return "|".join([first, *(name.rpartition(".")[2] for name in others)])
