"""plait beside every tensor-parallel library that runs on CPUs, two ranks of one thread on one host.

What is measured: wall time of forward and backward of one Llama block, and of the ends of a model (embedding, LM head,
cross entropy; 32,000 rows), the slowest rank's. All peers of an item are started first and then take turns, in rounds
of shuffled order, so that what disturbs the machine disturbs all of them. `compute_only` is the same local work with
nothing communicated: every result is given as a multiple of it, by medians of all samples.

`peers/README.md` says how each is run. plait and plain torch run in the environment of this script, the others in
environments that `peers/mkvenv.sh` makes.

    python benchmarks/same_host.py                                # everything
    python benchmarks/same_host.py --items block-64 block-128     # these only; the others in same_host.json are kept
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.bench.machine import describe_machine

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from driver import python_of  # noqa: E402
from harness.launch import PeerFailed, Running  # noqa: E402
from peers_table import PEERS  # noqa: E402

BOUND = "compute_only"
REFERENCE = "unsharded"
OURS = "plait"
YARDSTICKS = (REFERENCE, BOUND, "manual_gloo:tp", "manual_gloo:sp")
"""What is no library: a hand-written twin, and bounds."""

LIBRARIES = (
    "dtensor:tp", "dtensor:sp", "transformers", "megatron_core:tp", "megatron_core:sp", "fairscale", "deepspeed",
    "deepspeed:overlap", "torchtitan:sp", "jax:gspmd", "jax:collective", "jax:gspmd:2proc",
)  # fmt: skip
SETTINGS = (
    "plait:sp",
    "plait:sp:shm",
    "plait:sp:shm:none",
    "plait:sp:ring",
    "plait:sp:disabled",
    "plait:tp",
)
NAMES = (REFERENCE, BOUND, "manual_gloo:sp", *SETTINGS, *LIBRARIES)

WORST_DIFFERENCE = 1e-4
"""Of a fingerprint, relative: sums of squares in float32, summed in other orders (JAX 4e-6)."""


@dataclass(frozen=True)
class Case:
    """A work item, and how often it runs: `rounds` times each peer does `samples` samples of `steps` steps.

    Attributes:
        without: peers that would not fit into 20 GB of memory beside the others, another of the same library stays.
    """

    item: dict[str, Any]
    rounds: int
    samples: int
    steps: int
    without: tuple[str, ...] = ()


def _small(hidden: int, heads: int, kv_heads: int, ffn: int) -> Case:
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "seq": 64}
    return Case({"kind": "block", **sizes}, rounds=12, samples=4, steps=10)


LARGE = ("plait:sp:shm:none", "plait:sp:ring", "dtensor:tp", "jax:gspmd:2proc")

CASES = {
    "block-64": _small(64, 4, 2, 176),
    "block-128": _small(128, 4, 2, 352),
    "block-256": _small(256, 8, 4, 704),
    "block-1024": Case({"kind": "block"}, rounds=5, samples=2, steps=1, without=(*LARGE, "deepspeed")),
    "ends-1024": Case({"kind": "head"}, rounds=4, samples=1, steps=1, without=(*LARGE, "jax:collective")),
}


def main() -> None:
    """Measure the items asked for, write the result and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--items", nargs="+", default=list(CASES), choices=list(CASES), metavar="ITEM")
    parser.add_argument("--peers", nargs="+", default=list(NAMES), choices=list(PEERS), metavar="PEER")
    parser.add_argument("--rounds", type=int, help="interleaved rounds, instead of each item's own number")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    # The one thing the environments of plain torch and of plait must not differ in is torch.
    for env in ("PEERS_PYTHON_TORCH", "PEERS_PYTHON_PLAIT"):
        os.environ.setdefault(env, sys.executable)
    results = json.loads(arguments.out.read_text())["items"] if arguments.out.exists() else {}
    names = list(dict.fromkeys([REFERENCE, BOUND, *arguments.peers]))
    for name in arguments.items:
        case = CASES[name]
        results[name] = measure(case, names, arguments.rounds or case.rounds)
        record = {"what": __doc__.partition("\n")[0], "items": {key: results[key] for key in CASES if key in results}}
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")
        print_result(name, results[name])


def measure(case: Case, names: list[str], rounds: int) -> dict[str, Any]:
    """Start every peer, let them take turns, and summarize."""
    machine = describe_machine() | {"threads_per_rank": 1}
    item = {"dtype": "float32", **case.item}
    failed: dict[str, str] = {}
    running: dict[str, Running] = {}
    taken: dict[str, list[dict[str, float]]] = {}
    try:
        with tempfile.TemporaryDirectory() as logs:
            for name in names:
                if item["kind"] in PEERS[name].kinds and name not in case.without:
                    start(name, item, Path(logs), running, failed)
            for round_ in range(rounds):
                order = list(running)
                random.Random(round_).shuffle(order)
                for name in order:
                    try:
                        # Whatever of it the others have put out of the caches comes back in untimed steps.
                        running[name].iterate(case.steps)
                        taken.setdefault(name, []).extend(
                            running[name].iterate(case.steps) for _ in range(case.samples)
                        )
                    except PeerFailed as error:
                        failed[name] = str(error).splitlines()[-1]
                        running.pop(name).kill()
            prints = {name: peer.fingerprint for name, peer in running.items()}
    finally:
        for peer in running.values():
            peer.kill()
    summary = {name: summarize(taken[name], taken[BOUND], prints[name], prints[REFERENCE]) for name in running}
    counts = {"rounds": rounds, "samples_per_round": case.samples, "steps_per_sample": case.steps}
    return {
        "machine": machine,
        "item": item,
        "ranks": 2,
        **counts,
        "peers": summary,
        "failed": failed,
        **compare(summary),
    }


def start(name: str, item: dict[str, Any], logs: Path, running: dict[str, Running], failed: dict[str, str]) -> None:
    """Start one peer; what does not start is named and left out."""
    peer = PEERS[name]
    begun = time.monotonic()
    try:
        running[name] = Running(
            python_of(peer), peer.module, dict(peer.options), item, peer.world or 2, threads=peer.threads,
            processes=peer.processes, extra_env=peer.env_vars, pin=peer.pin, warmup=2, log_dir=logs / name,
        )  # fmt: skip
    except (PeerFailed, OSError) as error:
        failed[name] = str(error).splitlines()[-1]
    print(f"{name}: {failed.get(name, 'started')} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)


def summarize(
    taken: list[dict[str, float]],
    bound: list[dict[str, float]],
    fingerprint: dict[str, float] | None,
    reference: dict[str, float] | None,
) -> dict[str, Any]:
    """Times of one peer, beside those of the bound."""
    times_s = sorted(each["ms"] / 1e3 for each in taken)
    low, middle, high = statistics.quantiles(times_s, n=4)
    bounds_s = [each["ms"] / 1e3 for each in bound]
    return {
        "median_s": middle,
        "quartiles_s": [low, high],
        "least_s": times_s[0],
        "over_compute_only": middle / statistics.median(bounds_s),
        "least_over_compute_only": times_s[0] / min(bounds_s),
        "cpu_s": statistics.median(each["cpu_ms"] / 1e3 for each in taken),
        "cores_of_others": statistics.median(each["others"] for each in taken),
        "worst_difference": find_worst_difference(fingerprint, reference),
    }


def find_worst_difference(fingerprint: dict[str, float] | None, reference: dict[str, float] | None) -> float | None:
    """Of loss and norms of gradients, to the unsharded run."""
    if fingerprint is None or reference is None:
        return None
    assert set(fingerprint) <= set(reference), (fingerprint, reference)
    worst = max(abs(value - reference[key]) / abs(reference[key]) for key, value in fingerprint.items())
    assert worst <= WORST_DIFFERENCE, f"a peer computes something else: {worst}"
    return worst


def compare(summary: dict[str, Any]) -> dict[str, Any]:
    """The best of plait's settings, and the best library beside it."""
    ours = {name: each["median_s"] for name, each in summary.items() if name.startswith(OURS)}
    theirs = {name: each["median_s"] for name, each in summary.items() if name not in ours and name not in YARDSTICKS}
    # Devices of one process are threads, which need no way between processes.
    between_processes = {name: time_s for name, time_s in theirs.items() if PEERS[name].processes is None}
    result: dict[str, Any] = {}
    if ours:
        best = min(ours, key=ours.__getitem__)
        result["best_plait"] = best
        for key, group in (("best_library", theirs), ("best_library_between_processes", between_processes)):
            if group:
                name = min(group, key=group.__getitem__)
                result[key] = {"name": name, "over_plait": group[name] / ours[best]}
    return result


def print_result(name: str, result: dict[str, Any]) -> None:
    """A line for each peer, the fastest first."""
    print(f"\n{name}  (load average {result['machine']['load_average']:.1f} before)")
    print(f"{'':20} {'median ms':>10} {'least ms':>10} {'over compute only':>18} {'by least':>9} {'difference':>11}")
    for peer, each in sorted(result["peers"].items(), key=lambda pair: pair[1]["median_s"]):
        difference = "" if each["worst_difference"] is None else f"{each['worst_difference']:.0e}"
        print(
            f"{peer:20} {1e3 * each['median_s']:10.2f} {1e3 * each['least_s']:10.2f} {each['over_compute_only']:18.2f} "
            f"{each['least_over_compute_only']:9.2f} {difference:>11}"
        )
    for peer, why in result["failed"].items():
        print(f"{peer:20} failed: {why}")
    for key in ("best_library", "best_library_between_processes"):
        if key in result:
            best = result[key]
            print(f"{key.replace('_', ' ')} {best['name']}: {best['over_plait']:.2f} x {result['best_plait']}")


if __name__ == "__main__":
    main()
