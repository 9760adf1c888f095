"""What quantizing and decoding a matrix costs per element, for each recipe, beside copying the same matrix.

For each tensor of a recipe, as the GEMMs of a linear read it in a training step: `measure` finds its largest magnitude,
`quantize` makes its codes (with stochastic rounding and the Hadamard transform where the recipe has them), and `decode`
gives back their exact numbers, which the emulated GEMM multiplies. Noise is drawn before, and is not in the times.
`copy` writes the float32 matrix to memory that is there already; what quantizing and decoding write is new each time.

All acts on a matrix run in interleaved rounds; times are seconds per element and per orientation asked for, and
ratios to the copy are taken within a round. Medians over rounds, and the fastest.

    python benchmarks/quantize.py        # writes quantize.json beside itself
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.bench.machine import describe_machine
from plait.config.recipe import RECIPES, Operand, Recipe
from plait.contract.quantization import Orientation, list_orientations
from plait.quant.cast import Quantized, quantize
from plait.quant.scale import derive_scale, measure_amax

SHAPES = {"in cache": (128, 1024), "out of cache": (2048, 4096)}
READERS = {"input": ("forward", "wgrad"), "weight": ("forward",), "gradient": ("dgrad", "wgrad")}
SIGNS = torch.tensor([1.0, -1.0] * 8)
NAMES = [name for name in RECIPES if name != "fp8_delayedscaling"]
"""A delayed scale changes where the scale comes from, and no work on elements but `measure`, later."""

Act = Callable[[], object]


def main() -> None:
    """Measure all shapes, write the result and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds")
    parser.add_argument("--seconds", type=float, default=0.02, help="of each act in a round, at least one of it")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    machine = describe_machine()  # first, so that the load average is that of others
    torch.set_num_threads(1)
    results = {
        what: {"shape": shape, **measure_shape(shape, arguments.rounds, arguments.seconds)}
        for what, shape in SHAPES.items()
    }
    record = {"what": (__doc__ or "").partition("\n")[0], "machine": machine | {"threads_per_rank": 1}}
    text = json.dumps({**record, "rounds": arguments.rounds, "results": results}, indent=2) + "\n"
    arguments.out.write_text(text)
    print_results(results)


def measure_shape(shape: tuple[int, int], rounds: int, seconds: float) -> dict[str, Any]:
    """Medians over rounds, and the fastest, of all recipes."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(x)
    acts: dict[str, tuple[Act, int]] = {"copy": (lambda: target.copy_(x), x.numel())}
    for name in NAMES:
        for tensor in READERS:
            acts |= {f"{name} {tensor} {what}": act for what, act in list_acts(x, RECIPES[name], tensor).items()}
    repeats = {name: count_repeats(act, seconds) for name, (act, _) in acts.items()}
    times_s: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(rounds):
        for name, (act, num_elements) in acts.items():
            times_s[name].append(time_act(act, repeats[name]) / num_elements)
    copies = times_s["copy"]
    return {
        "element_s": {name: summarize(times) for name, times in times_s.items()},
        "ratio_to_copy": {
            name: summarize([own / copy for own, copy in zip(times, copies, strict=True)])
            for name, times in times_s.items()
            if name != "copy"
        },
    }


def list_acts(x: Tensor, recipe: Recipe, tensor: str) -> dict[str, tuple[Act, int]]:
    """What is done with one tensor, and how many elements that is."""
    operand = recipe.operands[tensor]
    orientations = list_orientations(operand, READERS[tensor])
    signs = SIGNS if recipe.hadamard and tensor != "weight" else None
    noise = None
    if recipe.stochastic_rounding and tensor == "gradient":
        noise = tuple(torch.rand(x.shape) for _ in orientations)
    scales = find_scales(x, operand, orientations, signs)
    num_elements = x.numel() * len(orientations)

    def make() -> Quantized:
        return quantize(x, operand, orientations, scales, noise=noise, signs=signs)

    quantized = make()

    def decode() -> list[Tensor]:
        return [quantized.decode(orientation, torch.float32) for orientation in orientations]

    acts: dict[str, tuple[Act, int]] = {"quantize": (make, num_elements), "decode": (decode, num_elements)}
    if operand.has_tensor_scale:
        acts["measure"] = (lambda: measure_amax(x, operand, orientations, signs=signs), num_elements)
    return acts


def find_scales(
    x: Tensor, operand: Operand, orientations: tuple[Orientation, ...], signs: Tensor | None
) -> tuple[Tensor | None, ...]:
    """By the tensor's own largest magnitude."""
    if not operand.has_tensor_scale:
        return (None,) * len(orientations)
    return derive_scale(measure_amax(x, operand, orientations, signs=signs), operand).unbind()


def count_repeats(act: Act, seconds: float) -> int:
    """How often it runs in that time, the first time aside."""
    act()
    return max(1, int(seconds / time_act(act, 1)))


def time_act(act: Act, repeats: int) -> float:
    """Seconds of one."""
    start_s = time.perf_counter()
    for _ in range(repeats):
        act()
    return (time.perf_counter() - start_s) / repeats


def summarize(values: list[float]) -> dict[str, float]:
    """Median and least."""
    return {"median": statistics.median(values), "least": min(values)}


def print_results(results: dict[str, Any]) -> None:
    """A line for each act."""
    for what, result in results.items():
        print(f"{what}, {list(result['shape'])}")
        for name, times in result["element_s"].items():
            ratio = result["ratio_to_copy"].get(name, {"median": 1.0})["median"]
            print(f"  {name:44} {times['median'] * 1e9:8.2f} ns {ratio:6.1f} times the copy")


if __name__ == "__main__":
    main()
