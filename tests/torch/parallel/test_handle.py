"""How the operators that stand for parallel linears find them."""

import gc
from copy import deepcopy

import pytest

from plait.comm.handle import find_by_handle
from plait.config.overlap import OverlapConfig
from plait.errors import ShardingError
from plait.overlap.collective_matmul import CollectiveMatmul
from plait.overlap.site import Site
from plait.parallel.region.boundary import Boundary
from plait.sharding import Invariant
from tests.support.lone_mesh import build_lone_mesh


def build_exit():
    mesh = build_lone_mesh(1)
    site = Site("here", "mlp", 4, 3, "float32")
    return Boundary.build_exit(mesh, Invariant(), site, CollectiveMatmul(mesh, OverlapConfig()))


def test_a_copy_is_found_by_a_number_of_its_own():
    """A graph compiled of the copy must not run, and keep running, what it was copied from."""
    exit = build_exit()
    copy = deepcopy(exit)
    assert copy.handle != exit.handle
    assert find_by_handle(copy.handle) is copy
    assert find_by_handle(exit.handle) is exit


def test_what_is_no_more_is_not_found():
    handle = build_exit().handle
    gc.collect()
    with pytest.raises(ShardingError, match=f"^a compiled graph runs parallel linear {int(handle)}, which is no more"):
        find_by_handle(handle)
