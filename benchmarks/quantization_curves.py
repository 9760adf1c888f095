"""Training loss under every precision recipe beside float32 and bfloat16: same model, data, seed and steps, two ranks.

The model and the corpus are those of `make demo`, with four blocks, of which the first and the last stay in high
precision, as a run's do by default. No window of the corpus is seen twice, so the training loss is one on new text. The
gap of a recipe is the difference of its last losses to those of float32, both averaged, in nats; beside it stands that
of float32 from another seed, with which a reader can judge what of it is chance.

Runs already measured are kept: `python benchmarks/quantization_curves.py [--recipes NAME ...]` (writes
quantization_curves.json beside itself and docs/images/quantization_curves.png; numbers do not depend on the machine's
load).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from plait.bench.machine import describe_machine

ROOT = Path(__file__).parents[1]
CONFIG, FOLDER, CORPUS = ROOT / "configs/demo.toml", ROOT / "runs/quantization", ROOT / "runs/demo/corpus"
PICTURE = ROOT / "docs/images/quantization_curves.png"
HIGH = "float32"
STEPS, LAST = 300, 50
"""Steps of a run, and how many of the last losses are averaged."""
SMOOTHED = 20

SHARED = (
    "model.num_layers=4", f"train.steps={STEPS}", "train.checkpoint_every=0", "train.keep_checkpoints=1",
    "train.resume=never", f"out_dir={FOLDER}", f"data.paths={CORPUS}",
    f"data.tokenizer={CORPUS.parent / 'tokenizer.json'}",
)  # fmt: skip

RUNS: dict[str, tuple[str, ...]] = {
    HIGH: (),
    "float32, seed 2": ("seed=2",),
    "bfloat16": ("precision.compute=bfloat16",),
    "fp8_currentscaling": ("quantization=fp8_currentscaling",),
    "fp8_currentscaling, e4m3 gradients": ("quantization=fp8_currentscaling", "quantization.gradient.format=e4m3"),
    "fp8_delayedscaling": ("quantization=fp8_delayedscaling",),
    "mxfp8": ("quantization=mxfp8",),
    "nvfp4": ("quantization=nvfp4",),
}

COLORS = {
    "bfloat16": "#888888",
    "fp8_currentscaling": "#2f6db3",
    "fp8_currentscaling, e4m3 gradients": "#5b9bd5",
    "fp8_delayedscaling": "#1b3a5c",
    "mxfp8": "#e07b39",
    "nvfp4": "#c0392b",
}
"""As in the other pictures: blues, and what has blocks in orange and red."""


def main() -> int:
    """Train what is asked for or missing, and draw all there is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipes", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)} [default: what is missing]")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"losses": {}}
    losses: dict[str, list[float]] = record["losses"]
    for name in arguments.recipes or [name for name in RUNS if name not in losses]:
        prepare_corpus()
        losses[name] = train(name)
        record = {
            "what": __doc__.partition("\n")[0],
            "machine": describe_machine(),
            "config": "configs/demo.toml",
            "overrides": [each for each in SHARED if each.startswith(("model.", "train.steps"))],
            "tp": 2,
            "results": judge(losses),
            "losses": {name: losses[name] for name in RUNS if name in losses},
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {describe(record['results'].get(name, {}))}")
    if HIGH in losses:
        draw(losses, PICTURE)
    return 0


def prepare_corpus() -> None:
    """Let the demo write its corpus and tokenizer, where it has not yet."""
    if not (CORPUS.parent / "tokenizer.json").exists():
        sys.path.insert(0, str(ROOT / "examples"))
        import demo  # noqa: PLC0415

        os.chdir(ROOT)
        demo.train_tokenizer(demo.collect_corpus())


def train(name: str) -> list[float]:
    """The loss of every step of one run."""
    run = name.replace(", ", "-").replace(" ", "-")
    shutil.rmtree(FOLDER / run, ignore_errors=True)
    command = [sys.executable, "-m", "plait", "train", str(CONFIG), *SHARED, f"name={run}", *RUNS[name]]
    subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = (FOLDER / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    shutil.rmtree(FOLDER / run / "checkpoints", ignore_errors=True)
    return [round(json.loads(line)["loss"], 6) for line in lines]


def judge(losses: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """The last losses of each run, and how far they are above those of float32, step by step of the same data."""
    results = {}
    for name, each in losses.items():
        results[name] = {"final_loss": fmean(each[-LAST:])}
        if HIGH in losses:
            results[name]["gap"] = fmean(each[-LAST:]) - fmean(losses[HIGH][-LAST:])
    return results


def describe(result: Mapping[str, Any]) -> str:
    """One line."""
    return ", ".join(f"{key} {value:.4f}" for key, value in result.items())


def draw(losses: Mapping[str, Sequence[float]], path: Path) -> None:
    """The smoothed curves, and below them how far each is above float32."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure((9.0, 6.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    high = smooth(losses[HIGH])
    steps = range(SMOOTHED, len(losses[HIGH]) + 1)
    above.plot(steps, high, color="black", lw=2.5, label=HIGH)
    below.axhline(0, color="black", lw=2.5)
    for name, color in COLORS.items():
        if name in losses:
            own = smooth(losses[name])
            above.plot(steps, own, color=color, lw=1.3, label=name)
            below.plot(steps, [one - other for one, other in zip(own, high, strict=True)], color=color, lw=1.3)
    above.set_ylabel("training loss (nats)")
    below.set_ylabel(f"above {HIGH}")
    below.set_xlabel(f"step; mean of {SMOOTHED}")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", lw=0.8)
    above.legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def smooth(losses: Sequence[float]) -> list[float]:
    """Means of so many steps in a row."""
    return [fmean(losses[stop - SMOOTHED : stop]) for stop in range(SMOOTHED, len(losses) + 1)]


if __name__ == "__main__":
    sys.exit(main())
