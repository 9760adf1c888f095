"""What the wrapper does without other ranks: nothing on an axis of degree 1, and refusals before anything is sent."""

import pytest
import torch

from plait.comm import collectives
from plait.comm.autograd import redistribute
from plait.comm.mesh import Axis, build_mesh
from plait.comm.trace import record
from plait.errors import ConfigError, ShardingError
from plait.sharding import Invariant, Kind, MeshShape, Partial, Replicate, Shard, build_split, list_transitions

PAIR = Axis("tp", 2, 1, (0, 1), None, None)
"""Without a process group: issuing anything on it fails."""
SEVEN = build_split(7, 2)


@pytest.fixture
def alone() -> Axis:
    return build_mesh(MeshShape()).tp


def test_on_one_rank_every_collective_is_the_identity_and_issues_nothing(alone):
    x, whole = torch.ones(7, 2), build_split(7, 1)
    with record() as trace:
        results = [
            collectives.all_reduce(x, alone),
            collectives.all_gather(x, alone, whole),
            collectives.reduce_scatter(x, alone, whole),
            collectives.all_to_all(x, alone, gather=(0, whole), scatter=(1, build_split(2, 1))),
            collectives.take_own(x, alone, whole),
        ]
    assert all(result is x for result in results)
    assert trace.collectives == []


@pytest.mark.parametrize("transition", list_transitions(), ids=str)
def test_on_one_rank_every_transition_is_the_identity(alone, transition):
    x = torch.ones(7, 2, requires_grad=True)
    assert redistribute(x, alone, transition.source, transition.target) is x


def test_a_transition_that_the_table_lacks_is_refused_even_on_one_rank(alone):
    with pytest.raises(ShardingError, match="no transition from Replicate to Shard"):
        redistribute(torch.ones(2), alone, Replicate(), Shard(0))


@pytest.mark.parametrize(
    "issue",
    [
        lambda x: collectives.all_reduce(x, PAIR),
        lambda x: collectives.all_gather(x[:3], PAIR, SEVEN),
        lambda x: collectives.reduce_scatter(x, PAIR, SEVEN),
        lambda x: collectives.all_to_all(x[:3], PAIR, gather=(0, SEVEN), scatter=(1, build_split(2, 2))),
        lambda x: collectives.take_own(x, PAIR, SEVEN),
    ],
)
def test_a_tensor_that_requires_grad_is_not_sent_without_a_backward(issue):
    """FIELD 3.12: a raw all_reduce in the loss has no backward, and the gradient is wrong without an error."""
    with pytest.raises(ShardingError, match=r"has no backward, and its input \[\d, 2\] requires grad"):
        issue(torch.ones(7, 2, requires_grad=True))


def test_what_a_rank_holds_must_be_what_the_split_says():
    with pytest.raises(
        ShardingError, match=r"mlp: rank 1 on 'tp' of degree 2 has \[4, 2\], but dim 0 should have 3 of 7"
    ):
        collectives.all_gather(torch.ones(4, 2), PAIR, SEVEN, label="mlp")
    with pytest.raises(ShardingError, match=r"has \[4, 2\], but dim 0 should have 7 of 7"):
        collectives.reduce_scatter(torch.ones(4, 2), PAIR, SEVEN)
    with pytest.raises(ShardingError, match=r"has \[7\], but dim 1 should have 7"):
        collectives.take_own(torch.ones(7), PAIR, SEVEN, dim=1)


def test_a_split_for_another_degree_is_refused():
    with pytest.raises(ShardingError, match="a split over 3 ranks does not fit axis 'tp' of degree 2"):
        collectives.all_gather(torch.ones(2), PAIR, build_split(6, 3))


def test_a_row_of_the_table_needs_to_know_the_cut():
    with pytest.raises(ShardingError, match="head: all_gather over tp needs to know how dim 0 is cut"):
        collectives.apply(Kind.ALL_GATHER, torch.ones(3), PAIR, split=None, label="head")
    with pytest.raises(ShardingError, match="needs to know which dim is cut afterwards"):
        collectives.apply(Kind.ALL_TO_ALL, torch.ones(3), PAIR, split=SEVEN)
    with pytest.raises(ShardingError, match="reduce_scatter over tp needs to know how"):
        redistribute(torch.ones(3, requires_grad=True), PAIR, Partial(), Shard(0))


def test_a_transition_that_moves_nothing_either_way_is_the_identity():
    x = torch.ones(3, requires_grad=True)
    assert redistribute(x, PAIR, Invariant(), Invariant()) is x


def test_take_own_copies_so_that_the_whole_tensor_can_be_freed():
    x = torch.arange(14.0).view(7, 2)
    own = collectives.take_own(x.t(), PAIR, SEVEN, dim=1)
    assert torch.equal(own, x[4:].t())
    assert own.is_contiguous()
    assert own.untyped_storage().nbytes() == own.numel() * own.element_size()


def test_a_mesh_of_another_size_than_the_world_is_refused():
    with pytest.raises(ConfigError, match="mesh tp=2 needs 2 ranks, but the world has 1") as refused:
        build_mesh(MeshShape(tp=2))
    assert "init_process_group" in (refused.value.hint or "")
