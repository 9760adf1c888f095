"""The peers the driver knows.  To add one: write ``peers/<module>.py`` with

    def setup(rank, world, item, **options) -> step            # or (step, fingerprint)

and add a line here.  ``step()`` runs one forward + backward of the work item.  README.md has the
whole contract.
"""

from dataclasses import dataclass, field

BOTH = ("block", "head")
BLOCK = ("block",)


@dataclass(frozen=True)
class Peer:
    module: str  # peers/<module>.py
    env: str  # virtual environment it runs in
    options: dict = field(default_factory=dict)  # keyword arguments of setup()
    kinds: tuple[str, ...] = BOTH
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    world: int | None = None  # None: the driver's --world
    processes: int | None = None  # 1: one process drives all devices; None: one per rank
    threads: int = 1  # OMP_NUM_THREADS of each process
    pin: bool = False  # pin process r to core r
    env_vars: dict = field(default_factory=dict)
    baseline: str = "unsharded"  # the same framework, unsharded, one thread


JAX = dict(module="jax_xla", env="jax", baseline="jax:unsharded")
PLAIT = dict(module="plait", env="plait")
TWO_DEVICES = {"BENCH_JAX_DEVICES": "2"}

PEERS: dict[str, Peer] = {
    # yardsticks
    "unsharded": Peer("unsharded", "torch", world=1),
    "unsharded:2threads": Peer("unsharded", "torch", world=1, threads=2),
    "compute_only": Peer("compute_only", "torch", {"mode": "sp"}),
    "manual_gloo:tp": Peer("manual_gloo", "torch", {"mode": "tp"}),
    "manual_gloo:sp": Peer("manual_gloo", "torch", {"mode": "sp"}),
    # ours
    "plait:sp": Peer(**PLAIT, options={"mode": "sp"}),
    "plait:sp:shm": Peer(**PLAIT, options={"mode": "sp", "overlap": "full", "transport": "shm"}),
    "plait:sp:shm:none": Peer(**PLAIT, options={"mode": "sp", "overlap": "auto", "transport": "shm", "method": "none"}),
    "plait:sp:ring": Peer(**PLAIT, options={"mode": "sp", "overlap": "full", "transport": "ring"}),
    "plait:sp:disabled": Peer(**PLAIT, options={"mode": "sp", "overlap": "disabled"}),
    "plait:tp": Peer(**PLAIT, options={"mode": "tp"}),
    "plait:tp:shm": Peer(**PLAIT, options={"mode": "tp", "overlap": "full", "transport": "shm"}),
    "plait:tp:shm:none": Peer(**PLAIT, options={"mode": "tp", "overlap": "auto", "transport": "shm", "method": "none"}),
    # libraries
    "dtensor:tp": Peer("dtensor", "torch", {"mode": "tp"}),
    "dtensor:sp": Peer("dtensor", "torch", {"mode": "sp"}),
    "transformers": Peer("transformers_tp", "hf"),
    "megatron_core:tp": Peer("megatron_core", "megatron", {"mode": "tp"}),
    "megatron_core:sp": Peer("megatron_core", "megatron", {"mode": "sp"}),
    "fairscale": Peer("fairscale_mp", "fairscale"),
    "deepspeed": Peer("deepspeed_autotp", "deepspeed"),
    "deepspeed:overlap": Peer("deepspeed_autotp", "deepspeed", {"overlap": True}, kinds=BLOCK),
    "torchtitan:tp": Peer("torchtitan_block", "titan", {"mode": "tp"}, kinds=BLOCK),
    "torchtitan:sp": Peer("torchtitan_block", "titan", {"mode": "sp"}, kinds=BLOCK),
    "jax:unsharded": Peer(**JAX, world=1, processes=1, pin=True),
    "jax:gspmd": Peer(**JAX, options={"mode": "gspmd"}, processes=1, env_vars=TWO_DEVICES),
    "jax:collective": Peer(**JAX, options={"mode": "collective"}, processes=1, env_vars=TWO_DEVICES),
    "jax:gspmd:2proc": Peer(**JAX, options={"mode": "gspmd"}, pin=True),
    "jax:collective:2proc": Peer(**JAX, options={"mode": "collective"}, pin=True),
}
