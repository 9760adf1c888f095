"""The mesh of one rank among several that do not exist: enough to cut parameters, not to communicate."""

import torch

from plait.comm.mesh import Axis, Mesh
from plait.sharding import AXES, COMBINED, MeshShape


def build_lone_mesh(tp: int, rank: int = 0) -> Mesh:
    """What tp rank `rank` of `tp` sees."""
    ranks = tuple(range(tp))
    axes = {name: Axis(name, 1, 0, (rank,), None, None) for name in (*AXES, *COMBINED)}
    axes["tp"] = Axis("tp", tp, rank, ranks, None, None)
    shape = MeshShape(tp=tp)
    return Mesh(
        shape,
        rank,
        torch.device("cpu"),
        shape.coordinates(rank),
        axes,
        tp_groups=(ranks,),
        ranks=torch.arange(tp).reshape(shape.degrees),
    )
