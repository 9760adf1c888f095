"""Ring, all-gather and all-to-all attention over a slow link, by sequence length, and how evenly orders share it out.

Two ranks in network namespaces of their own (`netlab.py`) have half of each sequence. The link is set once, so that at
a middle length the keys, values and gradients of an all-gather alone take as long as the attention alone; computing
grows with the square of the length, what moves only with the length itself. For each length, in interleaved rounds,
forward and backward of one attention:

* each method with each order, as `plait.parallel.context.attention.attend` runs it, timed on the slower rank;
* what each rank computes with all keys at hand and nothing moved, from which follows how even the order is: the slower
  rank over the mean, beside the same ratio of score elements that is known without running.

Run as root: `python benchmarks/context_parallel.py` (writes context_parallel.json beside itself).
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import netlab
import torch

from plait.bench.machine import describe_machine
from plait.bench.rounds import Spread, meet, time_rounds, warm_up
from plait.comm.environment import detect_launch
from plait.comm.launch import init_from_environment
from plait.comm.mesh import Axis, build_mesh
from plait.contract.context.attention import AttentionSize, ContextMethod
from plait.contract.context.balance import derive_balance
from plait.contract.context.mask import CAUSAL
from plait.contract.context.traffic import derive_context_traffic
from plait.parallel.context.attention import attend
from plait.parallel.context.context import Context, build_context, check_tensors
from plait.parallel.context.tile import Accumulator, attend_tiles, attend_tiles_backward, build_rows
from plait.sharding import MeshShape
from plait.sharding.token_order import Order

DEGREE = 2
LENGTHS = (512, 1024, 2048, 4096, 8192)
BALANCED_AT = 2048
"""The length at which an all-gather's bytes take as long as computing."""
NUM_HEADS, NUM_KV_HEADS, HEAD_WIDTH = 8, 4, 64
TIMEOUT_S = 600.0
CALIBRATION_ROUNDS = 3


def main() -> int:
    """Measure all lengths."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds at each length")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--balanced-at", type=int, default=BALANCED_AT)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--nice", type=int, default=0, help="priority of the ranks, where others use the machine")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure_as_rank(arguments)
        return 0
    if (problem := netlab.find_problem()) is not None:
        print(f"skipped: {problem}")
        return 0
    with netlab.build_network(DEGREE) as network:
        lengths = list(map(str, arguments.lengths))
        options = ["--rounds", str(arguments.rounds), "--out", str(arguments.out), "--lengths", *lengths]
        network.start([sys.executable, __file__, *options, "--balanced-at", str(arguments.balanced_at)])
        if arguments.nice:
            for process in network.processes:
                netlab.raise_priority(process, arguments.nice)
        status = network.wait()
    if not status:
        record = {"machine": describe_machine(), **json.loads(arguments.out.read_text())}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        print_result(record)
    return status


def measure_as_rank(arguments: argparse.Namespace) -> None:
    """All lengths; rank 0 writes the result."""
    with init_from_environment(detect_launch(os.environ), TIMEOUT_S):
        torch.set_num_threads(1)
        axis = build_mesh(MeshShape(cp=DEGREE)).cp
        netlab.set_rate(None)
        bytes_per_s = calibrate(axis, arguments.balanced_at)
        netlab.set_rate(bytes_per_s)
        results = {str(length): measure(axis, length, arguments.rounds) for length in arguments.lengths}
        if axis.rank == 0:
            sizes = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_width": HEAD_WIDTH, "cp": DEGREE}
            record = {**sizes, "dtype": "float32", "rounds": arguments.rounds, "balanced_at": arguments.balanced_at}
            record |= {"link_bytes_per_s": bytes_per_s, "lengths": results}
            arguments.out.write_text(json.dumps(record))


def calibrate(axis: Axis, length: int) -> float:
    """Bytes a second at which the traffic of an all-gather takes as long as computing alone."""
    context = build_context(axis, length, method=ContextMethod.ALL_GATHER)
    steps = {"compute": build_alone(context)}
    warm_up(steps, axis)
    compute_s = statistics.median(time_rounds(steps, CALIBRATION_ROUNDS, axis)["compute"])
    return sum(count_sent(context)) / compute_s


def measure(axis: Axis, length: int, rounds: int) -> dict[str, Any]:
    """All methods and orders at one length."""
    contexts = {
        f"{method} {order}": build_context(axis, length, method=method, order=order)
        for method, order in product(ContextMethod, Order)
    }
    alone = {str(order): build_alone(contexts[f"{ContextMethod.RING} {order}"]) for order in Order}
    steps: dict[str, Callable[[], None]] = {name: build_step(context) for name, context in contexts.items()}
    warm_up(steps, axis)
    times_s = time_rounds(steps, rounds, axis)
    ranks_s = {name: time_ranks(step, rounds, axis) for name, step in alone.items()}
    return {
        "ways": {
            name: {
                "time_s": Spread.of(times_s[name]).to_json(),
                "sent_bytes": count_sent(context),
                "counted_imbalance": derive_balance(
                    find_plan(context), context.method, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS
                ).imbalance,
            }
            for name, context in contexts.items()
        },
        "orders": {
            name: {"compute_s": each, "imbalance": max(each) * len(each) / sum(each)} for name, each in ranks_s.items()
        },
    }


def time_ranks(step: Callable[[], None], rounds: int, axis: Axis) -> list[float]:
    """Median seconds of each rank, which works without the others."""
    times_s = []
    step()
    for _ in range(rounds):
        meet(axis)
        start_s = perf_counter()
        step()
        times_s.append(perf_counter() - start_s)
    found: list[float] = [0.0] * axis.degree
    torch.distributed.all_gather_object(found, statistics.median(times_s), group=axis.group)
    return found


def draw(context: Context) -> list[torch.Tensor]:
    """Own queries, keys, values and gradient of the output."""
    generator = torch.Generator().manual_seed(context.axis.rank)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    return [torch.randn(1, number, context.num_own_tokens, HEAD_WIDTH, generator=generator) for number in heads]


def build_step(context: Context) -> Callable[[], None]:
    """One attention over both ranks, forward and backward."""
    q, k, v, grad = draw(context)
    for x in (q, k, v):
        x.requires_grad_()

    def step() -> None:
        torch.autograd.grad(attend(q, k, v, context), (q, k, v), grad)

    return step


def build_alone(context: Context) -> Callable[[], None]:
    """What this rank computes of it, with all keys at hand."""
    q, _, _, grad = draw(context)
    generator = torch.Generator().manual_seed(9)
    shape = (1, NUM_KV_HEADS, context.order.size, HEAD_WIDTH)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    tiles, scale = find_plan(context).row_tiles(context.axis.rank), HEAD_WIDTH**-0.5

    def step() -> None:
        seen = Accumulator(q)
        attend_tiles(q, k, v, tiles, scale, seen)
        grads = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
        attend_tiles_backward(build_rows(grad, q, seen.out, seen.lse, scale), k, v, tiles, grads)

    return step


def find_plan(context: Context) -> Any:
    """What sees what."""
    q, k, v, _ = draw(context)
    return check_tensors(q, k, v, context, CAUSAL, "benchmark")


def count_sent(context: Context) -> list[float]:
    """Bytes that each pass of this rank sends at least, forward and backward."""
    size = AttentionSize(1, NUM_HEADS, NUM_KV_HEADS, HEAD_WIDTH, "float32", "float32")
    traffic = derive_context_traffic(find_plan(context), size, context.method)
    return [each.sent_bytes(context.axis.rank) for each in (traffic.forward, traffic.backward)]


def print_result(record: dict[str, Any]) -> None:
    """One line a way."""
    print(f"link {record['link_bytes_per_s'] / 1e6:.1f} MB/s")
    for length, entry in record["lengths"].items():
        for name, way in entry["ways"].items():
            print(f"{length:>6} {name:24} {way['time_s']['median']:.3f} s, sends {sum(way['sent_bytes']) / 1e6:.1f} MB")
        for name, order in entry["orders"].items():
            shown = ", ".join(f"{each:.3f}" for each in order["compute_s"])
            print(f"{length:>6} {name:24} computing alone {shown} s, imbalance {order['imbalance']:.3f}")


if __name__ == "__main__":
    sys.exit(main())
