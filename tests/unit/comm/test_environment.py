"""Who started this process, read from variables alone."""

import pytest

from plait.comm.environment import check_world_size, detect_launch, first_host
from plait.errors import ConfigError
from plait.sharding import AXES, MeshShape

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[03-05,07]",
}


def test_nothing_set_is_alone():
    assert detect_launch({"PATH": "/bin"}).kind == "alone"


def test_torchrun_gives_rank_world_and_rendezvous():
    launch = detect_launch(TORCHRUN)
    assert (launch.kind, launch.rank, launch.local_rank, launch.world_size) == ("torchrun", 5, 1, 8)
    assert (launch.master_addr, launch.master_port) == ("head", 29500)


@pytest.mark.parametrize(
    ("rank", "agent", "holds"), [("0", "False", True), ("0", "True", False), ("1", "False", False)]
)
def test_rank_0_holds_the_store_unless_the_agent_does(rank, agent, holds):
    assert detect_launch({**TORCHRUN, "RANK": rank, "TORCHELASTIC_USE_AGENT_STORE": agent}).holds_store is holds


def test_slurm_gives_rank_world_and_the_first_host():
    launch = detect_launch(SLURM)
    assert (launch.kind, launch.rank, launch.local_rank, launch.world_size) == ("slurm", 3, 1, 4)
    assert launch.master_addr == "node03"
    assert not launch.holds_store
    assert detect_launch({**SLURM, "SLURM_PROCID": "0"}).holds_store


def test_slurm_ranks_of_one_step_agree_on_a_port_and_other_steps_take_another():
    ports = {detect_launch({**SLURM, "SLURM_PROCID": rank}).master_port for rank in "0123"}
    assert len(ports) == 1
    assert detect_launch({**SLURM, "SLURM_STEP_ID": "1"}).master_port not in ports


def test_slurm_rendezvous_can_be_set_by_the_user():
    launch = detect_launch({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (launch.master_addr, launch.master_port) == ("10.0.0.1", 1234)


def test_a_slurm_step_counts_its_own_tasks_not_those_of_the_job():
    assert detect_launch({**SLURM, "SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "4"}).world_size == 4


def test_one_slurm_task_is_alone_and_starts_the_ranks_of_its_host_itself():
    assert detect_launch({**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).kind == "alone"


def test_torchrun_inside_a_slurm_job_is_torchrun():
    assert detect_launch({**SLURM, **TORCHRUN}).kind == "torchrun"


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node[03-05,07]", "node03"),
        ("node7", "node7"),
        ("login1,node[1-4]", "login1"),
        ("rack[2-3]n[01-04],x", "rack2n01"),
        ("node[07,03-05]-ib", "node07-ib"),
        ("", ""),
    ],
)
def test_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({**TORCHRUN, "RANK": "first"}, "RANK='first' is not a number"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 is not a rank of WORLD_SIZE=8"),
        ({**SLURM, "SLURM_LOCALID": "x"}, "SLURM_LOCALID='x'"),
    ],
)
def test_contradicting_variables_are_refused_by_name(environ, message):
    with pytest.raises(ConfigError, match=message):
        detect_launch(environ)


def test_a_world_of_another_size_than_the_mesh_is_refused_before_any_process_group():
    with pytest.raises(
        ConfigError, match=r"torchrun started 8 ranks, but the mesh dp_replicate=2 tp=2 needs 4"
    ) as caught:
        check_world_size(detect_launch(TORCHRUN), MeshShape(dp_replicate=2, tp=2))
    assert all(axis in str(caught.value.hint) for axis in AXES)
    check_world_size(detect_launch(TORCHRUN), MeshShape(dp_replicate=2, tp=4))
    check_world_size(detect_launch({}), MeshShape(dp_replicate=2, tp=4))
