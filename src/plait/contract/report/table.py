"""Shape tables of the operations, in the form in which the docstrings of their runtime twins carry them.

x_shard   [T/tp, D]
w_shard   [F/tp, D]
y_shard   [T, F/tp]

forward   all_gather
backward  all_gather, reduce_scatter
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plait.contract.embedding import derive_vocab_embedding
from plait.contract.linear import LinearParameters, derive_column_group, derive_row
from plait.contract.loss import derive_cross_entropy, derive_entropy, derive_log_prob
from plait.contract.norm import derive_norm
from plait.contract.op import Op
from plait.contract.parameter import Parameter, build_vocab_split, derive_parameter_ownership
from plait.contract.plan import Column, Role, Row, TokenLocal, VocabEmbedding
from plait.contract.setting import Setting, Tensor
from plait.contract.step import Step, list_moves
from plait.sharding import Kind, Layout, Ownership, Shard

_SIZE = 8
"""Of every dim of the sample operations: letters are printed, so any size that can be cut will do."""


@dataclass(frozen=True)
class ShapeTable:
    """Layouts by tensor name, and the kinds of collectives, forward and backward, in either mode."""

    layouts: Mapping[str, str]
    forward: frozenset[Kind]
    backward: frozenset[Kind]
    forward_in_all_reduce_mode: frozenset[Kind]
    backward_in_all_reduce_mode: frozenset[Kind]

    def __str__(self) -> str:
        width = max(map(len, [*self.layouts, "backward"]))
        rows = [f"{name:<{width}}  {layout}" for name, layout in self.layouts.items()]
        phases = {"forward": self.forward, "backward": self.backward}
        moves = [f"{phase:<{width}}  {', '.join(sorted(kinds)) or 'nothing'}" for phase, kinds in phases.items()]
        return "\n".join([*rows, "", *moves])


def build_shape_table(contract: str) -> ShapeTable:
    """The table of the operation that `contract` derives, `linear.derive_row`."""
    derive = DERIVATIONS[contract]
    op, other = (derive(Setting(1, _SIZE, tp=2, sequence_parallel=is_sharded)) for is_sharded in (True, False))
    return ShapeTable(
        _list_layouts(op), _kinds(op.forward), _kinds(op.backward), _kinds(other.forward), _kinds(other.backward)
    )


def _list_layouts(op: Op) -> dict[str, str]:
    inputs, outputs = _name_all(op.inputs), _name_all(op.outputs)
    if list(inputs.values()) == list(outputs.values()):
        inputs, outputs = {name: f"{layout} -> the same" for name, layout in inputs.items()}, {}
    parameters = {_name_parameter(each): str(each.layout) for each in op.parameters}
    gathered = {
        f"{move.tensor}_full": f"[{', '.join(move.dims)}]"
        for move in list_moves(op.forward)
        if move.collective.kind is Kind.ALL_GATHER
    }
    return {**inputs, **parameters, **gathered, **outputs}


def _name_all(tensors: tuple[Tensor, ...]) -> dict[str, str]:
    return {_name(tensor.name, tensor.layout): str(tensor.layout) for tensor in tensors}


def _name(name: str, layout: Layout) -> str:
    return f"{name}_shard" if isinstance(layout.placement, Shard) else name


def _name_parameter(parameter: Parameter) -> str:
    name = parameter.ownership.name.rpartition(".")[2]
    return _name(name[0], parameter.layout) if isinstance(parameter.layout.placement, Shard) else name


def _kinds(steps: tuple[Step, ...]) -> frozenset[Kind]:
    return frozenset(move.collective.kind for move in list_moves(steps))


def _own(setting: Setting, role: Role, name: str, *shape: int) -> Ownership:
    return derive_parameter_ownership(name, shape, role, setting.tp, sequence_parallel=setting.sequence_parallel)


def _sample_column(setting: Setting) -> Op:
    weight = Parameter(_own(setting, Column(), "weight", _SIZE, _SIZE), ("F", "D"))
    return derive_column_group(setting, [LinearParameters("linear", weight)])


def _sample_row(setting: Setting) -> Op:
    weight = Parameter(_own(setting, Row(), "weight", _SIZE, _SIZE), ("D", "F"))
    bias = Parameter(_own(setting, Row(), "bias", _SIZE), ("D",))
    return derive_row(setting, LinearParameters("linear", weight, bias))


def _sample_norm(setting: Setting) -> Op:
    return derive_norm(setting, {"norm.weight": _own(setting, TokenLocal(), "norm.weight", _SIZE)}, "norm")


def _sample_embedding(setting: Setting) -> Op:
    table = _own(setting, VocabEmbedding(), "embedding.weight", _SIZE, _SIZE)
    return derive_vocab_embedding(setting, {"embedding.weight": table}, "embedding")


DERIVATIONS: Mapping[str, Callable[[Setting], Op]] = {
    "linear.derive_column_group": _sample_column,
    "linear.derive_row": _sample_row,
    "norm.derive_norm": _sample_norm,
    "embedding.derive_vocab_embedding": _sample_embedding,
    "loss.derive_cross_entropy": lambda setting: derive_cross_entropy(setting, build_vocab_split(_SIZE, setting.tp)),
    "loss.derive_log_prob": lambda setting: derive_log_prob(setting, build_vocab_split(_SIZE, setting.tp)),
    "loss.derive_entropy": lambda setting: derive_entropy(setting, build_vocab_split(_SIZE, setting.tp)),
}
"""The contracts that have a runtime twin with a docstring table, each for a sample of all sizes alike."""
