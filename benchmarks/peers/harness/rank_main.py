"""Runs one rank of one peer: ``python -m harness.rank_main``.  Started by ``launch.py`` only.

Talks to the launcher over two pipes (file descriptors in BENCH_FD_IN / BENCH_FD_OUT), one
JSON document per line.  The launcher's "go" is the barrier in front of each iteration, so
no peer needs a barrier of its own and the waiting costs no CPU.
"""

import ctypes
import gc
import importlib
import json
import os
import sys
import time
import traceback


def _proc_status(field: str) -> float:
    """A kB field of /proc/self/status, in MiB."""
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    return float("nan")


def _reset_peak_rss() -> None:
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # resets VmHWM to the current VmRSS
    except OSError:
        pass


def main() -> None:
    spec = json.loads(os.environ["BENCH_SPEC"])
    rank, world = spec["rank"], spec["world"]
    fin = os.fdopen(int(os.environ["BENCH_FD_IN"]), "r")
    fout = os.fdopen(int(os.environ["BENCH_FD_OUT"]), "w")

    def send(**message):
        fout.write(json.dumps(message) + "\n")
        fout.flush()

    try:
        from harness.workitem import WorkItem

        item = WorkItem(**spec["item"])
        peer = importlib.import_module(f"peers.{spec['module']}")
        rss_import = _proc_status("VmRSS")
        made = peer.setup(rank, world, item, **spec["options"])
        step, fingerprint = made if isinstance(made, tuple) else (made, None)
        step()
        send(event="ready", fingerprint=fingerprint() if fingerprint else None)
        for _ in range(spec["warmup"]):
            fin.readline()
            step()
            send(event="warm")
        _reset_peak_rss()
        rss_idle = _proc_status("VmRSS")
        while (line := fin.readline()).startswith("go"):  # "stop" ends the timed iterations
            steps = int(line.split()[1])
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            send(event="iter", ms=wall * 1e3 / steps, cpu_ms=cpu * 1e3 / steps)
        usage = dict(
            rss_import=rss_import,
            rss_idle=rss_idle,
            rss_peak=_proc_status("VmHWM"),
            threads=int(_proc_status("Threads") * 1024),
        )
        comm = {}
        if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
            from harness.comm_count import count

            comm = count(step)
        send(event="done", comm=comm, **usage)
        fin.readline()
        teardown = getattr(peer, "teardown", None)
        if teardown:
            teardown()
    except BaseException:
        send(event="error", traceback=traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some peers leave non-daemon threads behind


if __name__ == "__main__":
    main()
