"""The seed's case on paper: how much of a published speed-up the schedules explain, on a simulated clock.

NVIDIA's article "Collective GEMMs in Tensor Sequence Parallelism" reports 1.61x for Llama3-70B and 1.49x for 405B, in
FP8, and says neither on which GPU, at which tp, nor at which sequence length. Here the collective GEMMs of one layer,
forward and backward, run exposed and overlapped at the tp degrees of an eight-GPU NVLink domain, with what else a layer
does. Nothing is measured: constants and where they come from are in CONSTANTS, assumptions in ASSUMPTIONS.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from math import ceil, log
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from plait.config.model import LlamaConfig
from plait.config.presets import load_preset
from plait.schedule.costs import Costs
from plait.schedule.program import build_program, list_methods
from plait.schedule.simulate import simulate
from plait.schedule.step import Method
from plait.schedule.work import (
    Work,
    derive_column_backward,
    derive_column_forward,
    derive_row_backward,
    derive_row_forward,
)
from plait.sharding import Partial, Replicate, Shard, derive_transition

TOKENS = 8192
DEGREES = (2, 4, 8)
METHODS = (Method.BULK, Method.DIRECT)  # behind a switch a ring has nothing to add
CHUNKS = (1, 2, 4, 8)
PUBLISHED = {  # baseline and overlapped, model TFLOP/s per GPU
    "llama3-70b": (1008, 1620),
    "llama3-405b": (1201, 1788),
}

CONSTANTS: dict[str, tuple[float, str, str]] = {  # value, kind, source
    "peak_flops_per_s": (4.5e15, "datasheet", "B200 SXM, dense FP8"),
    "num_sm": (148, "datasheet", "B200 SXM"),
    "hbm_bytes_per_s": (7.7e12, "datasheet", "B200 SXM"),
    "hbm_efficiency": (0.8, "fitted", "AIConfigurator; BabelStream on H100 and H200 in Azure's AI benchmarking guide"),
    "kernel_s": (3e-6, "fitted", "NVIDIA AIConfigurator (github.com/ai-dynamo/aiconfigurator), memory-bound kernels"),
    "gemm_efficiency": (0.592, "fitted", "FP8 law on cuBLASLt points of GB200 in Azure's guide; assumed for B200"),
    "gemm_extra_k": (340, "fitted", "the same"),
    "gemm_wave_weight": (0.4, "fitted", "the same"),
    "gemm_launch_s": (4.9e-6, "fitted", "the same"),
    "attention_flops_per_s": (1.3e15, "fitted", "AIConfigurator, B200, bf16 causal forward: A s / (s + s0)"),
    "attention_s0": (1200, "fitted", "the same"),
    "attention_backward_rate": (0.75, "assumed", "2.5 times the FLOPs of forward, at this share of its rate"),
    "p2p_bytes_per_s": (746e9, "measured", "GB200, in AIConfigurator; assumed for B200. The datasheet has 900e9"),
    "message_s": (5e-6, "assumed", "from the last byte sent to a GEMM that starts on it"),
}  # fmt: skip

RATES = {  # of the GEMMs and attention in a step, against what they reach alone
    "sustained": (0.78, "fitted", "H100 training steps in NVIDIA dgxc-benchmarking 25.04; assumed for B200"),
    "burst": (1.0, "assumed", "as fast in a step as alone: then there is most to hide"),
}

COLLECTIVES: dict[str, dict[int, tuple[tuple[float, float], ...]]] = {
    # (latency_s, bytes_per_s) of the two protocols, the faster is taken; fitted to NCCL on B200 in AIConfigurator.
    "all_gather": {
        2: ((8.92e-6, 130.9e9), (21.19e-6, 435.2e9)),
        4: ((11.66e-6, 205.6e9), (31.51e-6, 585.0e9)),
        8: ((18.01e-6, 268.4e9), (33.85e-6, 639.8e9)),
    },
    "reduce_scatter": {
        2: ((9.19e-6, 155.5e9), (18.24e-6, 405.0e9)),
        4: ((11.65e-6, 231.7e9), (27.8e-6, 571.5e9)),
        8: ((17.84e-6, 335.7e9), (47.24e-6, 675.1e9)),
    },
}

ASSUMPTIONS = [
    "B200: the article names no GPU, but 1620 and 1788 TFLOP/s are above 80 % of an H100's FP8 peak, more than its "
    "GEMMs reach alone",
    "one micro-batch of 8192 tokens, causal attention over all of them; the article has neither",
    "activations and their gradients travel in bf16, and sums are taken in bf16; GEMM operands are FP8, quantised with "
    "scales of their own tensor in a pass that reads 2 bytes and writes 2 (the copy and its transpose)",
    "exposed: the library's collectives before and behind every GEMM; hidden in backward: as a compiler that runs "
    "collectives asynchronously hides them, whole, under the GEMM that does not need them",
    "overlapped: per pass the faster of bulk and direct with 1, 2, 4 or 8 chunks, copied by engines that take no SM",
    "both move the same bytes; an overlapped run that gathers FP8 where its baseline gathers bf16 would gain more",
    "x is gathered again in backward; with recomputation all of forward runs again before it, collectives included",
    "of a step only the layers: not the weight gathers of FSDP, the head, the loss or the optimizer, which this "
    "overlap leaves as they are",
]  # fmt: skip


COLUMNS = {
    "compute_s": "the layer without any communication",
    "speedup": "exposed over overlapped",
    "speedup_at_most": "exposed over compute alone: what perfect hiding would give",
    "explained": "log(speedup) / log(published)",
    "slowdown_needed": "how many times slower than measured the baseline's collectives would have to be for the "
    "published ratio, if nothing else differed",
    "tflops": "model TFLOP/s per GPU of this layer; the published ones are of whole steps",
}


FIELDS = ("value", "kind", "source")


@dataclass(frozen=True)
class Baseline:
    """What the published baseline may have been like.

    Attributes:
        hides_in_backward: whether whole collectives run under GEMMs that do not need them.
        recomputes: whether forward runs again in backward.
    """

    hides_in_backward: bool
    recomputes: bool

    def __str__(self) -> str:
        hides = "hides in backward" if self.hides_in_backward else "hides nothing"
        return f"{hides}, recomputes" if self.recomputes else hides


BASELINES = [Baseline(hides, recomputes) for hides in (False, True) for recomputes in (False, True)]


@dataclass(frozen=True)
class Linear:
    """A column group or a row linear as one rank has it: `[T, K] @ [K, N]`, and how fast GEMMs are."""

    is_column: bool
    k: int
    n: int
    rate: float


@dataclass(frozen=True)
class Seconds:
    """One layer, forward or backward: what it computes, and what its collective GEMMs take with it."""

    compute_s: float
    exposed_s: float
    bulk_s: float
    overlapped_s: float

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(one + two for one, two in zip(asdict(self).values(), asdict(other).values(), strict=True)))


def get(name: str) -> float:
    """A constant."""
    return CONSTANTS[name][0]


def estimate_gemm_s(m: int, n: int, k: int, rate: float, *, out_bytes: int = 2) -> float:
    """An FP8 GEMM `[m, k] @ [k, n]`: tiles in waves over the SMs, or the bytes it touches."""
    per_sm = get("peak_flops_per_s") / get("num_sm") * get("gemm_efficiency") * rate
    waves = []
    for tile_m, tile_n, penalty in ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 1.06), (64, 128, 1.15)):
        tiles = ceil(m / tile_m) * ceil(n / tile_n) / get("num_sm")
        weight = get("gemm_wave_weight")
        wave = max((1 - weight) * tiles + weight * ceil(tiles), min(1.0, max(tiles, weight)))
        waves.append(penalty * wave * 2 * tile_m * tile_n * (k + get("gemm_extra_k")) / per_sm)
    touched = m * k + k * n + out_bytes * m * n
    return get("gemm_launch_s") + max(min(waves), touched / get("hbm_bytes_per_s"))


def estimate_memory_s(num_bytes: float) -> float:
    """A kernel that only moves bytes."""
    return get("kernel_s") + num_bytes / (get("hbm_bytes_per_s") * get("hbm_efficiency"))


def estimate_collective_s(kind: str, degree: int, num_bytes: float) -> float:
    """NCCL's collective over `num_bytes` of all ranks."""
    share = (degree - 1) / degree * num_bytes
    return min(latency_s + share / bytes_per_s for latency_s, bytes_per_s in COLLECTIVES[kind][degree])


def build_costs(linear: Linear, work: Work, degree: int, width: int) -> Costs:
    """What the passes of `linear` cost."""
    gemms: dict[str, Callable[[int], float]] = {
        "forward": lambda rows: estimate_gemm_s(rows, linear.n, linear.k, linear.rate),
        "dgrad": lambda rows: estimate_gemm_s(rows, linear.k, linear.n, linear.rate),
        # The gradient of the weight is read and written in float32.
        "wgrad": lambda rows: estimate_gemm_s(linear.n, linear.k, rows, linear.rate, out_bytes=8),
    }
    return Costs(
        gemm_s=gemms,
        row_bytes={flow.tensor: 2.0 * width for flow in work.flows},
        latency_s=get("message_s"),
        bytes_per_s=get("p2p_bytes_per_s"),
        add_row_s=2.0 * width / (get("hbm_bytes_per_s") * get("hbm_efficiency")),
        collect_s={flow.tensor: estimate_collective_s(flow.kind, degree, 2.0 * width * TOKENS) for flow in work.flows},
    )


def time_work(linear: Linear, work: Work, degree: int, width: int) -> tuple[Seconds, str]:
    """One pass of one linear in all ways, and which is the fastest."""
    costs = build_costs(linear, work, degree, width)

    def run(method: Method, chunks: int) -> float:
        return simulate([build_program(work, method, chunks, rank) for rank in range(degree)], costs).duration_s

    ways = {
        (method, chunks): run(method, chunks)
        for method in METHODS
        if method in list_methods(work)
        for chunks in (CHUNKS if method is Method.DIRECT else (1,))
    }
    exposed_s = run(Method.NONE, 1)
    (method, chunks), overlapped_s = min(
        [*ways.items(), ((Method.NONE, 1), exposed_s)], key=lambda way: way[1]
    )  # the exposed one may be the fastest
    compute_s = sum(costs.gemm_s[gemm](TOKENS) for gemm in work.gemms)
    bulk_s = hide_whole(work, costs)
    what = f"{'column' if linear.is_column else 'row'} {'+'.join(work.gemms)} [{TOKENS}, {linear.k}] @ {linear.n}"
    cut = f" of {chunks} chunks" if method is Method.DIRECT else ""
    shown = f"{what}: {method}{cut}, {1e3 * exposed_s:.3f} -> {1e3 * overlapped_s:.3f} ms"
    return Seconds(compute_s, exposed_s, bulk_s, overlapped_s), shown


def hide_whole(work: Work, costs: Costs) -> float:
    """The library's collectives, whole, each under a GEMM that does not need it, where there is one."""
    gather_s, reduce_s = (costs.collect_s[flow.tensor] if flow else 0.0 for flow in (work.gather, work.reduce))
    first_s, second_s = (costs.gemm_s[gemm](TOKENS) if gemm else 0.0 for gemm in (work.rowwise, work.summing))
    if work.gather and work.reduce:
        return max(first_s, gather_s) + max(second_s, reduce_s)
    return gather_s + first_s + second_s + reduce_s


def list_linears(model: LlamaConfig, degree: int, rate: float) -> list[Linear]:
    """The four of a layer."""
    heads, kv_heads = model.num_heads * model.head_width, model.num_kv_heads * model.head_width
    return [
        Linear(True, model.width, (heads + 2 * kv_heads) // degree, rate),
        Linear(False, heads // degree, model.width, rate),
        Linear(True, model.width, 2 * model.mlp_width // degree, rate),
        Linear(False, model.mlp_width // degree, model.width, rate),
    ]


def estimate_rest_s(model: LlamaConfig, degree: int, rate: float, *, is_backward: bool) -> float:
    """What a layer does beside its linears: attention, norms, residuals, rotations, SwiGLU, quantisation."""
    heads, kv_heads = model.num_heads * model.head_width // degree, model.num_kv_heads * model.head_width // degree
    speed = get("attention_flops_per_s") * TOKENS / (TOKENS + get("attention_s0")) * rate
    attention_s = 2 * TOKENS**2 * heads / speed
    rows, mlp = TOKENS // degree, model.mlp_width // degree
    kernels = [
        *[4 * rows * model.width] * 2,  # norms
        *[6 * rows * model.width] * 2,  # residuals
        *[4 * TOKENS * model.width] * 2,  # quantising what is gathered
        4 * TOKENS * (heads + kv_heads),  # rotations
        6 * TOKENS * mlp,  # SwiGLU
        4 * TOKENS * heads,  # quantising the input of the output projection
        4 * TOKENS * mlp,  # and that of the down projection
    ]
    memory_s = sum(map(estimate_memory_s, kernels))
    if is_backward:
        return attention_s * 2.5 / get("attention_backward_rate") + 2 * memory_s
    return attention_s + memory_s


def time_layer(model: LlamaConfig, degree: int, rate: float) -> tuple[Seconds, Seconds, list[str]]:
    """Forward and backward of one layer, and what runs in each pass."""
    entry, leave = derive_transition(Shard(0), Replicate()), derive_transition(Partial(), Shard(0))
    passes: dict[bool, list[Seconds]] = {False: [], True: []}
    shown_passes = []
    for linear in list_linears(model, degree, rate):
        forward, backward = (
            (partial(derive_column_forward, entry), partial(derive_column_backward, entry))
            if linear.is_column
            else (partial(derive_row_forward, leave), partial(derive_row_backward, leave))
        )
        for is_backward, derive in ((False, forward), (True, backward)):
            seconds, shown = time_work(linear, derive(TOKENS, degree), degree, model.width)
            passes[is_backward].append(seconds)
            shown_passes.append(shown)
    whole = []
    for is_backward, each in passes.items():
        rest_s = estimate_rest_s(model, degree, rate, is_backward=is_backward)
        whole.append(sum(each, Seconds(rest_s, rest_s, rest_s, rest_s)))
    return whole[0], whole[1], shown_passes


def count_flops(model: LlamaConfig) -> float:
    """Of a layer, forward and backward, as model FLOPs are counted: six per weight and token, and attention."""
    weights = sum(linear.k * linear.n for linear in list_linears(model, 1, 1.0))
    return 6 * weights * TOKENS + 3 * 2 * TOKENS**2 * model.num_heads * model.head_width


def list_results() -> Iterator[dict[str, Any]]:
    """A row per model, degree, rate and baseline."""
    for name, degree, (rate_name, (rate, _, _)) in product(PUBLISHED, DEGREES, RATES.items()):
        model = load_preset(name)
        assert isinstance(model, LlamaConfig)
        forward, backward, passes = time_layer(model, degree, rate)
        flops = count_flops(model) / degree / 1e12
        for baseline in BASELINES:
            total = forward + backward + (forward if baseline.recomputes else Seconds(0, 0, 0, 0))
            hidden_s = backward.exposed_s - backward.bulk_s if baseline.hides_in_backward else 0.0
            yield {
                "model": name, "tp": degree, "rate": rate_name, "baseline": str(baseline),
                **compare(name, total, total.exposed_s - hidden_s, flops),
                "passes": passes if baseline == BASELINES[0] else [],
            }  # fmt: skip


def compare(name: str, total: Seconds, exposed_s: float, flops: float) -> dict[str, Any]:
    """A layer that takes `exposed_s` beside the overlapped one, and both beside what was published."""
    before, after = PUBLISHED[name]
    published, speedup = after / before, exposed_s / total.overlapped_s
    moving_s = exposed_s - total.compute_s
    return {
        "compute_s": total.compute_s,
        "exposed_s": exposed_s,
        "overlapped_s": total.overlapped_s,
        "exposed_share": moving_s / exposed_s,
        "speedup": speedup,
        "speedup_at_most": exposed_s / total.compute_s,
        "published": published,
        "explained": log(speedup) / log(published),
        "slowdown_needed": (published * total.overlapped_s - total.compute_s) / moving_s,
        "tflops": {
            "exposed": flops / exposed_s,
            "overlapped": flops / total.overlapped_s,
            "compute_only": flops / total.compute_s,
            "published": [before, after],
        },
    }


def shorten(value: Any) -> Any:
    """Four digits of every number: there are no more in the constants."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: shorten(each) for key, each in value.items()}
    return [shorten(each) for each in value] if isinstance(value, list) else value


def build_reading(results: list[dict[str, Any]]) -> list[str]:
    """What the numbers say, and what they leave open."""

    def span(name: str, **where: object) -> tuple[float, float]:
        found = [row[name] for row in results if all(row[key] == value for key, value in where.items())]
        return min(found), max(found)

    lines = []
    for model, (before, after) in PUBLISHED.items():
        explained = [span("explained", model=model, tp=degree) for degree in DEGREES]
        shares = ", ".join(
            f"{low:.0%} to {high:.0%} at tp {degree}" for degree, (low, high) in zip(DEGREES, explained, strict=True)
        )
        needed = span("slowdown_needed", model=model, tp=8)
        alone = [row["tflops"]["compute_only"] for row in results if (row["model"], row["tp"]) == (model, 8)]
        lines.append(
            f"{model}: the schedules explain, of log {after / before:.2f}, {shares}, by what the baseline is; perfect "
            f"hiding would give {span('speedup_at_most', model=model, tp=8)[1]:.2f} at most. The rest needs "
            f"collectives {needed[0]:.1f} to {needed[1]:.1f} times slower in the baseline than alone at tp 8, or "
            "something else that the overlapped run does better, such as gathering in FP8. Without any communication "
            f"this layer would reach {min(alone):.0f} to {max(alone):.0f} TFLOP/s at tp 8; published are {before} -> "
            f"{after}."
        )
    return lines


def build_record() -> dict[str, Any]:
    """Everything, with what it rests on."""
    results = [shorten(row) for row in list_results()]
    collectives = {"kind": "fitted", "source": "NCCL on B200 in AIConfigurator, (latency_s, bytes_per_s)"}
    return {
        "what": __doc__.partition("\n")[0] if __doc__ else "",
        "reading": build_reading(results),
        "assumptions": ASSUMPTIONS,
        "columns": COLUMNS,
        "constants": {name: dict(zip(FIELDS, entry, strict=True)) for name, entry in CONSTANTS.items()},
        "rates": {name: dict(zip(FIELDS, entry, strict=True)) for name, entry in RATES.items()},
        "collectives": {**collectives, "value": COLLECTIVES},
        "results": results,
    }


def print_table(results: list[dict[str, Any]]) -> None:
    """A line per model, degree, rate and baseline."""
    table = Table(title="one layer, forward and backward, 8192 tokens, FP8 on B200, simulated")
    names = ("model", "tp", "rate", "baseline", "computes", "exposed", "overlapped", "speed-up", "at most", "published",
             "explains", "slower by", "TFLOP/s")  # fmt: skip
    for name in names:
        table.add_column(name, justify="left" if name in ("model", "rate", "baseline") else "right", no_wrap=True)
    for row in results:
        tflops = row["tflops"]
        table.add_row(
            row["model"], str(row["tp"]), row["rate"], row["baseline"],
            *(f"{1e3 * row[name]:.2f} ms" for name in ("compute_s", "exposed_s", "overlapped_s")),
            *(f"{row[name]:.2f}" for name in ("speedup", "speedup_at_most", "published")),
            f"{row['explained']:.0%}", f"{row['slowdown_needed']:.1f}",
            f"{tflops['exposed']:.0f} -> {tflops['overlapped']:.0f}",
        )  # fmt: skip
    Console(width=180).print(table)


def main() -> None:
    """Simulate, write the result and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print the record instead of the table")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    record = build_record()
    text = json.dumps(record, indent=2) + "\n"
    arguments.out.write_text(text)
    if arguments.json:
        print(text, end="")
    else:
        print_table(record["results"])
        print(*record["reading"], sep="\n\n")


if __name__ == "__main__":
    main()
