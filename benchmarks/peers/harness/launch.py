"""Starts the ranks of one peer, drives them iteration by iteration, collects the numbers.

Standard library only: runs under any Python, whatever the peers' environments hold.
"""

import json
import os
import select
import socket
import subprocess
import time
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent


TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


class PeerFailed(RuntimeError):
    pass


def machine_busy_ms() -> float:
    """CPU time everyone on this machine has used since boot, plus time stolen from it."""
    with open("/proc/stat") as f:
        user, nice, system, _idle, _io, _irq, _softirq, steal = map(int, f.readline().split()[1:9])
    return (user + nice + system + steal) * TICK_MS


def others_now(seconds: float = 1.0) -> float:
    """Cores in use on this machine just now (call it while nothing of ours runs)."""
    before = machine_busy_ms()
    time.sleep(seconds)
    return (machine_busy_ms() - before) / (seconds * 1e3)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class _Rank:
    def __init__(self, python: str, spec: dict, env: dict, cpus: set[int] | None, log: Path):
        to_child_r, self.to_child_w = os.pipe()
        self.from_child_r, from_child_w = os.pipe()
        env = dict(env, BENCH_SPEC=json.dumps(spec), BENCH_FD_IN=str(to_child_r), BENCH_FD_OUT=str(from_child_w))
        self.log = log
        with open(log, "w") as out:
            self.proc = subprocess.Popen(
                [python, "-m", "harness.rank_main"],
                cwd=BENCH,
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                pass_fds=(to_child_r, from_child_w),
                preexec_fn=(lambda: os.sched_setaffinity(0, cpus)) if cpus else None,
            )
        os.close(to_child_r)
        os.close(from_child_w)
        self.buffer = b""

    def tell(self, word: str) -> None:
        os.write(self.to_child_w, word.encode() + b"\n")

    def receive(self, deadline: float) -> dict:
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.from_child_r], [], [], left)[0]:
                raise PeerFailed(f"timed out; see {self.log}")
            chunk = os.read(self.from_child_r, 65536)
            if not chunk:
                raise PeerFailed(f"a rank died; see {self.log}")
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        message = json.loads(line)
        if message["event"] == "error":
            raise PeerFailed(message["traceback"].strip())
        return message

    def close(self) -> None:
        for fd in (self.to_child_w, self.from_child_r):
            os.close(fd)
        try:
            self.proc.wait(5)
        except subprocess.TimeoutExpired:
            self.proc.kill()  # our own child, by handle
            self.proc.wait()


class Running:
    """The ranks of one peer, set up and warm; they sleep until they are told to run.  Raises PeerFailed.

    ``processes`` is 1 for peers that drive all ``world`` devices from one process.
    """

    def __init__(
        self,
        python: str,
        module: str,
        options: dict,
        item: dict,
        world: int,
        *,
        threads: int = 1,
        processes: int | None = None,
        extra_env: dict | None = None,
        pin: bool = False,
        warmup: int = 1,
        timeout: float = 180.0,
        log_dir: Path,
    ):
        self.ranks: list[_Rank] = []
        self.timeout = timeout
        processes = processes or world
        log_dir.mkdir(parents=True, exist_ok=True)
        env = dict(os.environ)
        env.update(
            OMP_NUM_THREADS=str(threads),
            MKL_NUM_THREADS=str(threads),
            OPENBLAS_NUM_THREADS=str(threads),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(_free_port()),
            GLOO_SOCKET_IFNAME="lo",
            TP_SOCKET_IFNAME="lo",
            WORLD_SIZE=str(processes),
            CUDA_VISIBLE_DEVICES="",
            PYTHONPATH=str(BENCH),
            HF_HUB_OFFLINE="1",
            TRANSFORMERS_VERBOSITY="error",
            TOKENIZERS_PARALLELISM="false",
        )
        env.update(extra_env or {})
        cores = sorted(os.sched_getaffinity(0))
        tag = "-".join([module, *(f"{v}" for v in options.values()), item["kind"], item["dtype"]])
        try:
            for r in range(processes):
                spec = dict(rank=r, world=world, module=module, options=options, item=item, warmup=warmup)
                cpus = {cores[r % len(cores)]} if pin else None
                self.ranks.append(
                    _Rank(python, spec, dict(env, RANK=str(r), LOCAL_RANK=str(r)), cpus, log_dir / f"{tag}.rank{r}.log")
                )
            self.first = self._hear()
            for _ in range(warmup):
                self._tell("go")
                self._hear()
        except PeerFailed:
            self.kill()
            raise

    def iterate(self, steps: int = 1) -> dict:
        """The slowest rank's time for one of so many steps, all ranks' CPU time, and the cores others used."""
        wall, busy = time.monotonic(), machine_busy_ms()
        self._tell(f"go {steps}")
        said = self._hear()
        ours = sum(m["cpu_ms"] for m in said) * steps
        busy, wall = machine_busy_ms() - busy, (time.monotonic() - wall) * 1e3
        return dict(
            ms=max(m["ms"] for m in said), cpu_ms=sum(m["cpu_ms"] for m in said), others=max(0.0, (busy - ours) / wall)
        )

    @property
    def fingerprint(self) -> dict | None:
        """Of the first step, summed over the ranks."""
        prints = [m["fingerprint"] for m in self.first]
        return None if None in prints else {k: sum(p[k] for p in prints) for k in prints[0]}

    def finish(self) -> dict:
        """Collectives and memory; the ranks end."""
        self._tell("stop")
        last = self._hear()
        self._tell("bye")
        for rank in self.ranks:
            rank.close()
        return dict(comm=last[0]["comm"], fingerprint=self.fingerprint) | {
            key: [m[key] for m in last] for key in ("rss_peak", "rss_idle", "rss_import", "threads")
        }

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.proc.poll() is None:
                rank.proc.kill()  # our own child, by handle
            rank.close()

    def _tell(self, word: str) -> None:
        for rank in self.ranks:
            rank.tell(word)

    def _hear(self) -> list[dict]:
        """One message of each rank.

        Waits on whichever speaks first, so that one rank's error is seen even while the others hang in a collective.
        """
        deadline = time.monotonic() + self.timeout
        got: dict[int, dict] = {}
        while len(got) < len(self.ranks):
            waiting = [r for i, r in enumerate(self.ranks) if i not in got]
            ready = [r for r in waiting if b"\n" in r.buffer] or select.select(
                [r.from_child_r for r in waiting], [], [], max(0, deadline - time.monotonic())
            )[0]
            if not ready:
                raise PeerFailed(f"timed out; see {waiting[0].log}")
            for i, r in enumerate(self.ranks):
                if i not in got and (r in ready or r.from_child_r in ready):
                    got[i] = r.receive(deadline)
        return [got[i] for i in range(len(self.ranks))]


def run_peer(*args, iters: int = 4, max_iters: int = 4, quiet: float = 0.1, **kwargs) -> dict:
    """One spawn of one peer; returns per-iteration times, memory and counts.  Raises PeerFailed.

    Iterates until ``iters`` iterations were quiet (others used at most ``quiet`` cores) or
    ``max_iters`` are done.
    """
    peer = Running(*args, **kwargs)
    try:
        iterations: list[dict] = []
        while len(iterations) < max_iters and sum(it["others"] <= quiet for it in iterations) < iters:
            iterations.append(peer.iterate())
        last = peer.finish()
    except PeerFailed:
        peer.kill()
        raise
    return {key: [it[key] for it in iterations] for key in ("ms", "cpu_ms", "others")} | last
