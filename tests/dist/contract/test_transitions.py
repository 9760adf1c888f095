"""What a transition of the table issues on real ranks, forward and backward, is what contracts say it does."""

import pytest
import torch

from plait.comm.autograd import redistribute
from plait.comm.mesh import build_mesh
from plait.comm.trace import record
from plait.contract.setting import Setting
from plait.contract.step import derive_moves
from plait.sharding import MeshShape, Placement, Shard, build_split, derive_transition, list_transitions

T, D, TP = 7, 5, 3
SPLITS = (build_split(T, TP), build_split(D, TP))
PAIRS = [(t.source, t.target) for t in [*list_transitions(), derive_transition(Shard(1), Shard(0))]]


def run_transition(*, source: Placement, target: Placement) -> None:
    mesh = build_mesh(MeshShape(tp=TP))
    setting = Setting(1, T, TP, mesh.tp.rank, dtype="float32")
    tensor = setting.build_tensor("x", "D", D, source)
    x = torch.ones(tensor.layout.local_shape(mesh.tp.rank), requires_grad=True)
    cuts = [SPLITS[placement.dim] for placement in (source, target) if isinstance(placement, Shard)]
    with record() as trace:
        y = redistribute(
            x, mesh.tp, source, target, split=cuts[0] if cuts else None, target_split=cuts[1] if cuts[1:] else None
        )
        y.backward(torch.ones_like(y))
    transition = derive_transition(source, target)
    moves = [move for each in (transition, transition.conjugate) for move in derive_moves(setting, "x", each, tensor)]
    assert trace.collectives == [move.collective for move in moves]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_collectives_are_those_that_the_contract_derives(ranks, source, target):
    ranks(TP).call(run_transition, source=source, target=target)
