"""The mesh of one rank among several that do not exist: enough to cut parameters, not to communicate."""

import torch

from plait.comm.mesh import Axis, Mesh
from plait.sharding import Coordinates, MeshShape


def build_lone_mesh(tp: int, rank: int = 0) -> Mesh:
    """What tp rank `rank` of `tp` sees."""
    ranks = tuple(range(tp))
    return Mesh(
        MeshShape(tp=tp),
        rank,
        torch.device("cpu"),
        Coordinates(dp=0, tp=rank),
        dp=Axis("dp", 1, 0, (rank,), None, None),
        tp=Axis("tp", tp, rank, ranks, None, None),
        tp_groups=(ranks,),
    )
