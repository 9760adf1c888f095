"""Pieces of several ranks become whole tensors, and replicas that differ are named."""

import pytest
import torch

from plait.sharding import Interval, Ownership, Split, build_split
from plait.verify.runtime.pieces import Assembly, Pieces

HELD_TWICE = Split(4, (Interval(0, 2), Interval(0, 2), Interval(2, 4)))


def assemble(folder, ownership, tensors):
    parts = []
    for rank, tensor in enumerate(tensors):
        pieces = Pieces()
        pieces.add("gradient", ownership.name, ownership.shape, ownership.intervals(rank), tensor)
        pieces.save(str(folder), rank)
        parts.append(pieces.parts)
    return Assembly(str(folder), parts)


@pytest.mark.parametrize("dim", [0, 1])
def test_uneven_shards_are_put_together(tmp_path, dim):
    whole = torch.arange(7 * 5).view(7, 5)
    split = build_split(whole.shape[dim], 3)
    assembly = assemble(tmp_path, Ownership("w", (7, 5), dim, split), whole.split(split.lengths, dim))
    assert torch.equal(assembly.whole("gradient")["w"], whole)
    assert assembly.num_replicated == 0


def test_interval_held_twice_is_taken_once_and_compared(tmp_path):
    whole = torch.arange(8).view(4, 2)
    assembly = assemble(tmp_path, Ownership("w", (4, 2), 0, HELD_TWICE), [whole[:2], whole[:2], whole[2:]])
    assert torch.equal(assembly.whole("gradient")["w"], whole)
    assert (assembly.num_replicated, assembly.differing) == (1, [])


def test_replicas_that_differ_in_one_bit_are_named(tmp_path):
    """FIELD 3.9: replicated parameters that drift apart are found."""
    one = torch.ones(3)
    assembly = assemble(tmp_path, Ownership("norm.weight", (3,)), [one, one, one.nextafter(2 * one)])
    assembly.whole("gradient")
    assert assembly.num_replicated == 2
    assert assembly.differing == ["gradient: norm.weight differs between ranks 0 and 2"]


def test_a_rank_may_have_several_pieces_of_a_tensor_and_another_none(tmp_path):
    whole = torch.arange(12).view(6, 2)
    several, none = Pieces(), Pieces()
    for start in (4, 0, 2):
        several.add("logits", "logits", (6, 2), (Interval(start, start + 2), Interval(0, 2)), whole[start : start + 2])
    several.save(str(tmp_path), 0)
    none.save(str(tmp_path), 1)
    assert torch.equal(Assembly(str(tmp_path), [several.parts, none.parts]).whole("logits")["logits"], whole)


@pytest.mark.parametrize("intervals", [((0, 2),), ((0, 2), (1, 3)), ((0, 2), (1, 4)), ((0, 1), (2, 4))])
def test_pieces_that_leave_a_gap_or_overlap_are_no_tensor(tmp_path, intervals):
    pieces = Pieces()
    for start, stop in intervals:
        pieces.add("logits", "logits", (4,), (Interval(start, stop),), torch.zeros(stop - start))
    pieces.save(str(tmp_path), 0)
    with pytest.raises(AssertionError, match="logits: logits"):
        Assembly(str(tmp_path), [pieces.parts]).whole("logits")
