"""Who started this process: torchrun, Slurm, or nobody, and the rank it was given."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from plait.errors import ConfigError
from plait.sharding import MeshShape

_FIRST_SLURM_PORT = 20000


@dataclass(frozen=True)
class Launch:
    """What the environment says about this process."""

    kind: Literal["torchrun", "slurm", "alone"]
    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    """Number among the ranks of this host: the device it takes."""
    master_addr: str = ""
    master_port: int = 0
    holds_store: bool = False
    """Whether this rank has to hold the rendezvous store; with torchrun its agent may."""
    has_agent_store: bool = False
    """Whether torchrun's agent holds it."""


def detect_launch(environ: Mapping[str, str]) -> Launch:
    """Read torchrun's variables, else those of a Slurm step with several tasks, else answer that nobody did.

    Raises:
        ConfigError: variables that are missing or contradict each other.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _read_torchrun(environ)
    if "SLURM_PROCID" in environ and _num_slurm_tasks(environ) > 1:
        return _read_slurm(environ)
    return Launch("alone")


def check_world_size(launch: Launch, shape: MeshShape) -> None:
    """Refuse a world that is not the mesh, before any process group exists; alone, the ranks are still to be started.

    Raises:
        ConfigError: the numbers differ.
    """
    if launch.kind != "alone" and launch.world_size != shape.world_size:
        raise ConfigError(
            f"{launch.kind} started {launch.world_size} ranks, but the mesh {shape} needs {shape.world_size}",
            hint=f"start {shape.world_size} ranks, or choose degrees (parallel.pp, dp_replicate, dp_shard, cp, tp) "
            f"with product {launch.world_size}",
        )


def first_host(nodelist: str) -> str:
    """First name in a Slurm node list: `node[03-05,07],login1` -> `node03`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group() if first else "")


def _read_torchrun(environ: Mapping[str, str]) -> Launch:
    has_agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    launch = Launch(
        "torchrun",
        world_size=_integer(environ, "WORLD_SIZE"),
        rank=_integer(environ, "RANK"),
        local_rank=_integer(environ, "LOCAL_RANK" if "LOCAL_RANK" in environ else "RANK"),
        master_addr=_text(environ, "MASTER_ADDR"),
        master_port=_integer(environ, "MASTER_PORT"),
        holds_store=environ["RANK"] == "0" and not has_agent_store,
        has_agent_store=has_agent_store,
    )
    return _checked(launch, "RANK", "WORLD_SIZE")


def _read_slurm(environ: Mapping[str, str]) -> Launch:
    nodelist = next((environ[name] for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if environ.get(name)), "")
    # One port per job step, the same on every rank, so that two jobs on one host do not meet.
    step = 131 * int(environ.get("SLURM_JOB_ID", 0)) + int(environ.get("SLURM_STEP_ID", 0))
    launch = Launch(
        "slurm",
        world_size=_num_slurm_tasks(environ),
        rank=_integer(environ, "SLURM_PROCID"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        master_addr=environ.get("MASTER_ADDR") or first_host(nodelist) or "127.0.0.1",
        master_port=_integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else _FIRST_SLURM_PORT + step % 10000,
        holds_store=environ["SLURM_PROCID"] == "0",
    )
    return _checked(launch, "SLURM_PROCID", "SLURM_NTASKS")


def _num_slurm_tasks(environ: Mapping[str, str]) -> int:
    """Tasks of the step, as a batch script may run steps of fewer tasks than it asked for."""
    name = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ), None)
    return 1 if name is None else _integer(environ, name)


def _checked(launch: Launch, rank_name: str, size_name: str) -> Launch:
    if not 0 <= launch.rank < launch.world_size:
        raise ConfigError(f"environment: {rank_name}={launch.rank} is not a rank of {size_name}={launch.world_size}")
    return launch


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ConfigError(f"environment: {name} is not set", hint="start the ranks with torchrun, which sets it")
    return environ[name]


def _integer(environ: Mapping[str, str], name: str) -> int:
    value = _text(environ, name)
    if not value.isdecimal():
        raise ConfigError(f"environment: {name}={value!r} is not a number")
    return int(value)
