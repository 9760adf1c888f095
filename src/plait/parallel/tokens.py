"""Entering and leaving the token-sharded part of a model by hand.

A model with a vocabulary-parallel embedding enters by itself. A module that takes activations does it with these two.
"""

from torch import Tensor

from plait.comm.autograd import redistribute
from plait.comm.mesh import Mesh
from plait.errors import ShardingError
from plait.sharding import Interval, Invariant, Shard, Split, build_token_split


def enter_tokens(num_tokens: int, mesh: Mesh) -> Split:
    """Declare how many tokens the forward pass that starts now has, which fixes each rank's interval of them.

    They are cut in units that share a scale, where models on this mesh are quantized so.
    """
    mesh.tokens = build_token_split(num_tokens, mesh.tp.degree, mesh.token_unit)
    return mesh.tokens


def current_tokens(mesh: Mesh, where: str) -> Split:
    """The token split of the forward pass under way.

    Raises:
        ShardingError: no module has entered the token-sharded part.
    """
    if mesh.tokens is None:
        raise ShardingError(
            f"{where}: its input is to be sharded over tokens, but nothing said how many tokens there are",
            hint="start with a vocab_embedding, or with x_shard = plait.shard_tokens(x, mesh)",
        )
    return mesh.tokens


def check_own_tokens(x: Tensor, mesh: Mesh, where: str) -> Interval:
    """This rank's interval of tokens, of which `x` must be: whole tokens would have their gradient summed tp times.

    Raises:
        ShardingError: `x` has another number of tokens, or nothing said how many there are.
    """
    split = current_tokens(mesh, where)
    own, num_tokens = split.intervals[mesh.tp.rank], x.shape[:-1].numel()
    if num_tokens != len(own):
        raise ShardingError(
            f"{where}: got {num_tokens} tokens {list(x.shape)}, but tp rank {mesh.tp.rank} holds {own} of {split.size}",
            hint="token_local modules work between the regions, on own tokens; plait.shard_tokens takes them",
        )
    return own


def shard_tokens(x: Tensor, mesh: Mesh) -> Tensor:
    """Take this rank's interval of the tokens of `x`, which every tp rank holds.

    x          [T, D]       the same on all tp ranks
    x_shard    [T/tp, D]

    forward    nothing moves
    backward   all_gather over tp

    Raises:
        ShardingError: `x` has no dim of tokens beside its features.
    """
    if x.dim() < 2:
        raise ShardingError(
            f"shard_tokens: a tensor of shape {list(x.shape)} has no token dim beside its features",
            hint="flatten batch and sequence first: x.flatten(0, 1)",
        )
    split = enter_tokens(x.shape[0], mesh)
    return redistribute(x, mesh.tp, Invariant(), Shard(0), split=split, label="shard_tokens")


def gather_tokens(x_shard: Tensor, mesh: Mesh) -> Tensor:
    """Give every tp rank all tokens, for code after the token-sharded part.

    x_shard    [T/tp, D]
    x          [T, D]       the same on all tp ranks

    forward    all_gather over tp
    backward   nothing moves: each rank takes its own interval

    Raises:
        ShardingError: `x_shard` is not this rank's interval, or nothing said how many tokens there are.
    """
    split = current_tokens(mesh, "gather_tokens")
    return redistribute(x_shard, mesh.tp, Shard(0), Invariant(), split=split, label="gather_tokens")
