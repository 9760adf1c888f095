"""Ranks in network namespaces of their own, joined by links of a given rate: a real network on one machine.

Waiting for such a link leaves the core idle, as waiting does beside an accelerator; over loopback moving is work of the
very cores that compute. Two ranks are joined by one pair of interfaces, more of them by a switch, and every rank has
the rate in and out. Needs Linux, root, `ip` and `tc`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

MTU = 9000
_INTERFACE = "eth0"
_SWITCH = "PLAIT_NETLAB_SWITCH"
_PORT = 29500
_QUEUE_BYTES = 32 << 20
"""Long enough that the switch drops nothing; on the side of the ranks TCP keeps it short by itself."""
_MIN_BURST_BYTES = 72 * 1024
"""A packet as the kernel hands it to an interface has up to 64 KiB."""
_BURST_S = 1e-3
_END_S = 5.0
_MMAP_BYTES, _TRIM_BYTES = 1 << 30, 8 << 30
"""Freed memory is kept: fresh memory costs a page fault for each 4 KiB, in every variant alike, and hides the rest."""


def find_problem() -> str | None:
    """Why there can be no such network here, if so."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (iproute2)"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    name = f"plait{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"no network namespace can be made: {probe.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return None


def set_rate(bytes_per_s: float | None) -> None:
    """Called by every rank: let its link carry so much from now on, in either direction; None for as much as it can."""
    _limit(["tc"], _INTERFACE, bytes_per_s)
    if switch := os.environ.get(_SWITCH):
        _limit(["tc", "-n", switch], f"port{os.environ['RANK']}", bytes_per_s)


@dataclass
class Network:
    """Namespaces and the ranks in them.

    Attributes:
        switch: the namespace of the switch, where there are more than two ranks.
    """

    num_ranks: int
    namespaces: list[str] = field(default_factory=list)
    switch: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: Sequence[str]) -> None:
        """Run `command` in every namespace, with the environment that torchrun would give it."""
        tunables = f"glibc.malloc.mmap_threshold={_MMAP_BYTES}:glibc.malloc.trim_threshold={_TRIM_BYTES}"
        shared = {
            "WORLD_SIZE": str(self.num_ranks), "MASTER_ADDR": _address(0), "MASTER_PORT": str(_PORT),
            "GLOO_SOCKET_IFNAME": _INTERFACE, "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": tunables, _SWITCH: self.switch,
        }  # fmt: skip
        for rank, namespace in enumerate(self.namespaces[: self.num_ranks]):
            environ = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes.append(
                subprocess.Popen(["ip", "netns", "exec", namespace, *command], env=environ, start_new_session=True)
            )

    def wait(self) -> int:
        """The exit status of the first rank that fails, or 0 when all have ended."""
        while any(process.poll() is None for process in self.processes):
            failed = [process for process in self.processes if process.poll()]
            if failed:
                time.sleep(_END_S)  # for the others to notice and to say so
                break
            time.sleep(0.1)
        return next((process.returncode for process in self.processes if process.poll()), 0)

    def _make(self) -> None:
        for rank in range(self.num_ranks):
            self._add_namespace(f"plait{os.getpid()}r{rank}")
        own = self.namespaces[:]
        if self.num_ranks == 2:
            _run("ip", "-n", own[0], "link", "add", _INTERFACE, "type", "veth", "peer", _INTERFACE, "netns", own[1])
        else:
            self.switch = f"plait{os.getpid()}switch"
            self._add_namespace(self.switch)
            _run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for rank, namespace in enumerate(own):
            if self.switch:
                port = f"port{rank}"
                peer = ("peer", port, "netns", self.switch)
                _run("ip", "-n", namespace, "link", "add", _INTERFACE, "type", "veth", *peer)
                _run("ip", "-n", self.switch, "link", "set", port, "mtu", str(MTU), "master", "bridge", "up")
            _run("ip", "-n", namespace, "addr", "add", f"{_address(rank)}/24", "dev", _INTERFACE)
            _run("ip", "-n", namespace, "link", "set", _INTERFACE, "mtu", str(MTU), "up")

    def _add_namespace(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self.namespaces.append(name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        # The default may be one that paces by round trips, of which a token bucket makes no sense.
        congestion = ["ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=cubic"]
        subprocess.run(congestion, capture_output=True, check=False)

    def _remove(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for name in reversed(self.namespaces):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def build_network(num_ranks: int) -> Iterator[Network]:
    """A network while the block lasts; the ranks started in it end with it, also where the process is told to end."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    network = Network(num_ranks)
    try:
        network._make()
        yield network
    finally:
        network._remove()


def raise_priority(process: subprocess.Popen[bytes], nice: int) -> None:
    """Let a process go before what else runs on the machine; where sessions are grouped, nice counts inside only."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, nice)
        Path(f"/proc/{process.pid}/autogroup").write_text(str(nice), encoding="ascii")


def _address(rank: int) -> str:
    return f"10.99.0.{rank + 1}"


def _limit(tc: list[str], device: str, bytes_per_s: float | None) -> None:
    if bytes_per_s is None:
        subprocess.run([*tc, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
        return
    burst = max(_MIN_BURST_BYTES, int(bytes_per_s * _BURST_S))
    _run(
        *tc, "qdisc", "replace", "dev", device, "root",
        "tbf", "rate", f"{int(bytes_per_s * 8)}bit", "burst", str(burst), "limit", str(_QUEUE_BYTES),
    )  # fmt: skip


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
