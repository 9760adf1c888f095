#!/usr/bin/env python3
"""Runs the peers in interleaved rounds and prints a table.  See README.md.

python driver.py                                  # everything, block + head, float32
python driver.py --peers unsharded dtensor:sp --kinds block --rounds 5
python driver.py --small --rounds 1               # smoke test
python driver.py --from-raw --out results/x       # print the table of an earlier run
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness.launch import PeerFailed, others_now, run_peer  # noqa: E402
from peers_table import PEERS, Peer  # noqa: E402

VENVS = Path(os.environ.get("PEERS_VENVS", Path.home() / ".cache/plait-peers"))
REFERENCE = "unsharded"
BOUND = "compute_only"
ENOUGH = 4  # quiet iterations from which on the disturbed ones are left out
SMALL = dict(hidden=64, heads=8, kv_heads=4, ffn=96, vocab=512, seq=32)


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def python_of(peer: Peer) -> str:
    """A venv under PEERS_VENVS, or an interpreter given by PEERS_PYTHON_<ENV>."""
    return os.environ.get(f"PEERS_PYTHON_{peer.env.upper()}", str(VENVS / peer.env / "bin/python"))


class Samples:
    """All iterations of one peer on one work item, over all rounds."""

    def __init__(self, peer: Peer, runs: list[dict], quiet: float):
        rows = [r for run in runs for r in zip(run["ms"], run["cpu_ms"], run["others"])]
        self.total = len(rows)
        # one thread has a core to itself even if others keep another busy: then it is enough that
        # it was never kept waiting
        alone = peer.world == 1 and peer.threads == 1
        calm = [r for r in rows if r[2] <= quiet or (alone and r[1] >= 0.97 * r[0])]
        self.quiet = len(calm)
        # too few undisturbed iterations: say so by using (and marking) all of them
        self.disturbed = self.quiet < min(ENOUGH, self.total)
        rows = rows if self.disturbed else calm
        self.ms = sorted(r[0] for r in rows)
        self.cpu_ms = [r[1] for r in rows]
        self.runs = runs

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    def quantile(self, f: float) -> float:
        return self.ms[min(len(self.ms) - 1, int(f * len(self.ms)))]


def run_all(args) -> dict:
    data: dict = dict(results={}, failed={})
    if args.resume and (args.out / "raw.json").exists():
        data = json.loads((args.out / "raw.json").read_text())
    jobs = [
        (n, k, d)
        for d in args.dtypes
        for k in args.kinds
        for n in args.peers
        if k in PEERS[n].kinds and d in PEERS[n].dtypes
    ]
    end = time.monotonic() + args.budget
    for round_ in range(args.rounds):
        order = jobs[:]
        random.Random(round_).shuffle(order)
        for name, kind, dtype in order:
            key = f"{name}|{kind}|{dtype}"
            done = data["results"].get(key, [])
            if key in data["failed"] or time.monotonic() > end:
                continue
            if done and args.want and Samples(PEERS[name], done, args.quiet).quiet >= args.want:
                continue
            stop = time.monotonic() + args.wait_quiet
            while time.monotonic() < stop and others_now() > args.quiet:
                pass
            peer = PEERS[name]
            item = dict(kind=kind, dtype=dtype, **((SMALL if args.small else {}) | args.item))
            try:
                got = run_peer(
                    python_of(peer),
                    peer.module,
                    dict(peer.options),
                    item,
                    peer.world or args.world,
                    threads=peer.threads,
                    processes=peer.processes,
                    extra_env=peer.env_vars,
                    pin=peer.pin,
                    warmup=args.warmup,
                    iters=args.iters,
                    max_iters=max(args.iters, args.max_iters),
                    quiet=args.quiet,
                    timeout=args.timeout,
                    log_dir=args.out / "logs",
                )
            except PeerFailed as e:
                data["failed"][key] = str(e)
                log(f"round {round_} {key}: FAILED: {str(e).splitlines()[-1]}")
                continue
            data["results"].setdefault(key, []).append(got)
            log(
                f"round {round_} {key}: {statistics.median(got['ms']):.1f} ms, "
                f"others used {statistics.median(got['others']):.2f} cores"
            )
            (args.out / "raw.json").write_text(json.dumps(data))
    (args.out / "raw.json").write_text(json.dumps(data))
    return data


def worst_difference(got: dict | None, reference: dict | None) -> str:
    """Largest relative difference to the unsharded run, and how many of its values were compared."""
    if not got or not reference:
        return "-"
    keys = [k for k in reference if k in got]
    worst = max(abs(got[k] - reference[k]) / max(abs(reference[k]), 1e-12) for k in keys)
    return f"{worst:.0e} ({len(keys)}/{len(reference)})"


def comm_text(comm: dict) -> str:
    short = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A", "broadcast": "BC"}
    return ", ".join(f"{int(n)} {short.get(k, k)} {mib:.1f}" for k, (n, mib) in comm.items())


def table(args, data: dict) -> str:
    lines = []
    for dtype in args.dtypes:
        for kind in args.kinds:

            def samples(name, kind=kind, dtype=dtype):
                runs = data["results"].get(f"{name}|{kind}|{dtype}")
                return Samples(PEERS[name], runs, args.quiet) if runs else None

            rows = [n for n in args.peers if samples(n) or f"{n}|{kind}|{dtype}" in data["failed"]]
            if not rows:
                continue
            reference, bound = samples(REFERENCE), samples(BOUND)
            lines += [
                f"### {kind}, {dtype}",
                "",
                "| peer | processes x threads | median ms | min | p10..p90 | n (quiet/all) "
                "| speedup vs torch 1 thread | vs own 1 thread | over compute-only "
                "| CPU ms, all ranks | peak RSS per process MiB | RSS rise in step "
                "| collectives per step (calls, MiB) | max rel diff (values) |",
                "|" + "---|" * 14,
            ]
            for name in rows:
                peer, s = PEERS[name], samples(name)
                if not s:
                    why = data["failed"][f"{name}|{kind}|{dtype}"].splitlines()[-1]
                    lines.append(f"| {name} | | failed: {why[:120]} |" + " |" * 11)
                    continue
                own = samples(peer.baseline)
                ratio = lambda base, s=s: f"{base.median / s.median:.2f}" if base else ""  # noqa: E731
                over = f"{100 * (s.median / bound.median - 1):+.0f}%" if bound and peer.baseline == REFERENCE else ""
                peak = [max(r["rss_peak"]) for r in s.runs]
                rise = [max(p - i for p, i in zip(r["rss_peak"], r["rss_idle"])) for r in s.runs]
                prints = reference.runs[0]["fingerprint"] if reference else None
                lines.append(
                    "| "
                    + " | ".join(
                        [
                            name,
                            f"{peer.processes or peer.world or args.world} x {peer.threads}",
                            ("~" if s.disturbed else "") + f"{s.median:.1f}",
                            f"{s.ms[0]:.1f}",
                            f"{s.quantile(0.1):.0f}..{s.quantile(0.9):.0f}",
                            f"{s.quiet}/{s.total}",
                            ratio(reference),
                            ratio(own),
                            over,
                            f"{statistics.median(s.cpu_ms):.0f}",
                            f"{max(peak):.0f}",
                            f"{max(rise):.0f}",
                            comm_text(s.runs[0].get("comm", {})),
                            worst_difference(s.runs[0]["fingerprint"], prints),
                        ]
                    )
                    + " |"
                )
            lines.append("")
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--peers", nargs="+", default=list(PEERS), metavar="PEER")
    p.add_argument("--kinds", nargs="+", default=["block", "head"], choices=["block", "head"])
    p.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    p.add_argument("--world", type=int, default=2)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--iters", type=int, default=4, help="quiet timed iterations per peer and round")
    p.add_argument("--max-iters", type=int, default=8, help="timed iterations per peer and round, quiet or not")
    p.add_argument("--warmup", type=int, default=1, help="on top of the first, untimed one")
    p.add_argument("--timeout", type=float, default=180, help="seconds per spawn")
    p.add_argument("--budget", type=float, default=3600, help="no new spawn after this many seconds")
    p.add_argument(
        "--quiet", type=float, default=0.1, help="an iteration counts as quiet if others used at most this many cores"
    )
    p.add_argument(
        "--wait-quiet",
        type=float,
        default=0,
        help="before each spawn, wait up to this many seconds for a quiet machine",
    )
    p.add_argument(
        "--want", type=int, default=0, help="skip a peer in later rounds once it has this many quiet iterations"
    )
    p.add_argument("--small", action="store_true", help="tiny shapes: smoke test")
    p.add_argument(
        "--item",
        type=json.loads,
        default={},
        metavar="JSON",
        help='other shapes: \'{"hidden": 256, "heads": 8, "ffn": 704, "seq": 256}\'',
    )
    p.add_argument("--out", type=Path, default=Path("peer-results"))
    p.add_argument("--resume", action="store_true", help="add to the results already in --out")
    p.add_argument("--list", action="store_true", help="list the peers and stop")
    p.add_argument("--from-raw", action="store_true", help="only print the table of --out/raw.json")
    args = p.parse_args()
    if args.list:
        for name, peer in PEERS.items():
            print(f"{name:24} env={peer.env:16} kinds={','.join(peer.kinds)}")
        return
    unknown = [n for n in args.peers if n not in PEERS]
    if unknown:
        p.error(f"unknown peers {unknown}; --list shows them")
    args.out.mkdir(parents=True, exist_ok=True)
    data = json.loads((args.out / "raw.json").read_text()) if args.from_raw else run_all(args)
    text = table(args, data)
    (args.out / "table.md").write_text(text)
    print(text)
    for key, why in data["failed"].items():
        log(f"\nFAILED {key}:\n{why}")


if __name__ == "__main__":
    main()
