"""The device mesh as this rank sees it: its coordinates, and an axis with its process group for each direction.

axis.py     one direction, and the process groups of its kind
mesh.py     all of them
build.py    from a shape, or from a torch DeviceMesh
"""

from plait.comm.mesh.axis import Axis, build_message_group, timeout_of
from plait.comm.mesh.build import build_mesh, build_mesh_from
from plait.comm.mesh.mesh import Mesh

__all__ = ["Axis", "Mesh", "build_mesh", "build_mesh_from", "build_message_group", "timeout_of"]
