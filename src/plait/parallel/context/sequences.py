"""Telling a model which sequences its next forward pass has, of which it may get only some tokens."""

import torch
from torch import Tensor, nn

from plait.comm.mesh import Mesh
from plait.contract.context.mask import AttentionMask
from plait.contract.context.sequences import Sequences
from plait.errors import ShardingError
from plait.parallel.context.tokens import list_document_positions, list_positions, take_own
from plait.sharding import Interval
from plait.sharding.token_order import Order, build_order

Documents = tuple[tuple[Interval, ...], ...]


def current_sequences(mesh: Mesh, where: str) -> Sequences:
    """Those of the forward pass under way.

    Raises:
        ShardingError: nothing told of them.
    """
    if mesh.sequences is None:
        raise ShardingError(
            f"{where}: sequences are cut over {mesh.cp.degree} context ranks, but nothing said how long they are",
            hint="call plait.enter_sequences(model, seq_len) before each forward",
        )
    return mesh.sequences


def build_sequences(mesh: Mesh, order: Order | str, size: int, documents: Documents = ()) -> Sequences:
    """Deal sequences of `size` tokens to the ranks of the mesh's context axis."""
    mask = AttentionMask(documents=documents)
    return Sequences(build_order(Order(order), size, mesh.cp.degree), mesh.cp.rank, mask)


def take_own_tokens(x: Tensor, mesh: Mesh, *, dim: int = 1) -> Tensor:
    """The entries of `x`, `[B, S, ...]` on all ranks of cp, that go with this rank's tokens; nothing moves.

    x          [B, S, ...]       token ids, or labels that are shifted already
    x_shard    [B, S/cp, ...]

    Raises:
        ShardingError: `x` has another number of tokens, or `plait.enter_sequences` did not say how many there are.
    """
    sequences = current_sequences(mesh, "take_own_tokens")
    return take_own(x, sequences.order, sequences.rank, dim=dim)


class TokenPositions(nn.Module):
    """The positions of the tokens that a model gets; in packed sequences each document counts from 0.

    returns     [S], or [B, S] where rows have documents

    Attributes:
        mask: that of the pass under way; `plait.enter_sequences` sets it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mask = AttentionMask()

    def forward(self, size_BS: tuple[int, int], device: torch.device) -> Tensor:
        """Positions for rotary angles, or rows of a table."""
        batch, size = size_BS
        return _build_positions(Sequences(build_order(Order.CONTIGUOUS, size, 1), 0, self.mask), batch, device)

    def find_length(self, size_BS: tuple[int, int]) -> int:
        """How long the sequences are."""
        return size_BS[1]


class ContextPositions(nn.Module):
    """The same for this rank's tokens of sequences that are cut over the context axis.

    returns     [S/cp], or [B, S/cp] where rows have documents
    """

    def __init__(self, mesh: Mesh, name: str) -> None:
        super().__init__()
        self.mesh, self.name = mesh, name

    def forward(self, size_BS: tuple[int, int], device: torch.device) -> Tensor:
        """Positions of own tokens.

        Raises:
            ShardingError: the tokens are not this rank's.
        """
        sequences = self._find(size_BS)
        if sequences is None:
            return torch.arange(size_BS[1], device=device)
        if size_BS[1] != sequences.num_own:
            raise ShardingError(
                f"{self.name}: got {size_BS[1]} tokens of each sequence, but context rank {sequences.rank} of "
                f"{sequences.order.degree} has {sequences.num_own} of {sequences.size}",
                hint="give the model plait.take_own_tokens(tokens, mesh)",
            )
        return _build_positions(sequences, size_BS[0], device)

    def find_length(self, size_BS: tuple[int, int]) -> int:
        """How long the whole sequences are."""
        sequences = self._find(size_BS)
        return size_BS[1] if sequences is None else sequences.size

    def _find(self, size_BS: tuple[int, int]) -> Sequences | None:
        """None where sequences are whole, and nothing was said of documents in them."""
        found = self.mesh.sequences
        if self.mesh.cp.degree == 1 and (found is None or not found.mask.documents):
            return None
        return current_sequences(self.mesh, self.name)


def _build_positions(sequences: Sequences, batch: int, device: torch.device) -> Tensor:
    order, rank = sequences.order, sequences.rank
    if sequences.mask.documents:
        return list_document_positions(sequences.mask, batch, order, rank, device)
    return list_positions(order, rank, device)
