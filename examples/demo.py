"""Train a small Llama on the source of Python's standard library, on two ranks with tensor and sequence parallelism.

The run is interrupted half-way on purpose and resumed from its checkpoint, and the sharded model is verified against
the unsharded one. Everything is written to `runs/demo`. Exit status 0 only if the loss fell and verification passed.

    python examples/demo.py
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from math import ceil, floor
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
CONFIG = Path("configs/demo.toml")
FOLDER = Path("runs/demo")
VOCAB_SIZE = 4096
NOT_THE_LIBRARY = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "encodings", "pydoc_data"}
FALLEN = 5.0
"""Starts at log 4096 = 8.3; the frequencies of single tokens give 6.5, pairs of tokens 5.5; what was seen is 4.5."""
WINDOW = 20
"""Steps over which a loss is averaged before it is compared."""

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Run all of it; the exit status."""
    started = time.monotonic()
    os.chdir(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shutil.rmtree(FOLDER, ignore_errors=True)
    documents = collect_corpus()
    train_tokenizer(documents)
    interrupted = train(interrupt_half_way=True)
    resumed = train()
    losses = read_losses(Path(resumed["metrics"]))
    has_learned = judge_losses(losses, interrupted["step"])
    draw(losses, interrupted["step"])
    is_verified = verify()
    tell(f"Done in {time.monotonic() - started:.0f} s")
    console.print(f"  checkpoint   {resumed['checkpoint']}")
    console.print(f"  metrics      {resumed['metrics']}")
    console.print(f"  loss curve   {FOLDER / 'loss.svg'}")
    console.print(f"  verification {FOLDER / 'verify.json'}")
    return 0 if has_learned and is_verified else 1


def tell(what: str) -> None:
    """Announce a part of the demo."""
    console.print(f"\n[bold]{what}[/bold]")


def collect_corpus() -> list[str]:
    """Copy the standard library's own modules, without its tests, to `runs/demo/corpus`, as text."""
    library = Path(sysconfig.get_path("stdlib"))
    tell(f"Collecting the source of {library}")
    documents = []
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if NOT_THE_LIBRARY & set(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            target = FOLDER / "corpus" / relative.with_suffix(".txt")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            shutil.copystat(path, target)  # unchanged text keeps its time, so a second demo finds its tokens again
            documents.append(text)
    console.print(f"  {len(documents)} modules, {sum(map(len, documents)) / 1e6:.1f} million characters")
    return documents


def train_tokenizer(documents: list[str]) -> None:
    """Train a byte-level BPE on every second module, and write `runs/demo/tokenizer.json`."""
    tell(f"Training a byte-level BPE with {VOCAB_SIZE} tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents[::2], trainer)
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    example = "def __init__(self, name: str) -> None:"
    pieces = (example[start:stop] for start, stop in tokenizer.encode(example).offsets)
    console.print(f"  {'|'.join(pieces)}", markup=False)


def train(*, interrupt_half_way: bool = False) -> dict[str, Any]:
    """Run `plait train`, interrupted by Ctrl-C or to its end; the summary that it prints."""
    command = [sys.executable, "-m", "plait", "train", str(CONFIG)]
    tell("Training, to be interrupted half-way" if interrupt_half_way else "The same command again resumes it")
    console.print(f"  $ plait train {CONFIG}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if interrupt_half_way:
            wait_for_half(process)
            process.send_signal(signal.SIGINT)
        printed, _ = process.communicate()
    if process.returncode:
        sys.exit(process.returncode)
    summary: dict[str, Any] = json.loads(printed)
    console.print(f"  step {summary['step']}, loss {summary['loss']:.3f}, saved as {summary['checkpoint']}")
    return summary


def wait_for_half(process: "subprocess.Popen[str]") -> None:
    """Until the run has taken half of its steps, or has ended."""
    steps = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["train"]["steps"]
    while process.poll() is None and len(read_losses(FOLDER / "metrics.jsonl")) < steps // 2:
        time.sleep(0.2)


def read_losses(metrics: Path) -> list[float]:
    """The loss of every step so far; a line that is being written does not count yet."""
    if not metrics.exists():
        return []
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


def judge_losses(losses: list[float], interrupted_at: int) -> bool:
    """Whether the loss has fallen, and went on after the interruption where it had been."""
    first, last = losses[0], fmean(losses[-WINDOW:])
    before = fmean(losses[interrupted_at - WINDOW : interrupted_at])
    after = fmean(losses[interrupted_at : interrupted_at + WINDOW])
    tell("Loss")
    console.print(f"  {first:.2f} at the first step, {last:.2f} at the end (must be below {FALLEN})")
    console.print(f"  {before:.2f} before the interruption at step {interrupted_at}, {after:.2f} after")
    return last < FALLEN and abs(after - before) < 0.5


def draw(losses: list[float], interrupted_at: int, *, columns: int = 72, rows: int = 12) -> None:
    """Draw the loss curve in the terminal, and as `runs/demo/loss.svg`."""
    width = ceil(len(losses) / columns)
    means = [fmean(losses[start : start + width]) for start in range(0, len(losses), width)]
    low, high = min(means), max(means)
    heights = [round((mean - low) / (high - low or 1) * (rows - 1)) for mean in means]
    at = interrupted_at // width
    for row in reversed(range(rows)):
        cells = ["*" if height == row else "|" if column == at else " " for column, height in enumerate(heights)]
        console.print(f"  {low + (high - low) * row / (rows - 1):5.2f} {''.join(cells)}", markup=False)
    console.print(f"  {'':5} step 1 to {len(losses)}; | is the interruption")
    save_svg(losses, interrupted_at)


def save_svg(losses: list[float], interrupted_at: int) -> None:
    """Write the curve as an image: every step, and the mean of the last steps."""
    low, high = floor(min(losses)), ceil(max(losses))

    def place(step: float, loss: float) -> tuple[float, float]:
        return 60 + 720 * step / len(losses), 40 + 360 * (high - loss) / (high - low)

    def draw_line(values: list[float], style: str) -> str:
        points = " ".join("{:.1f},{:.1f}".format(*place(i, value)) for i, value in enumerate(values, 1))
        return f'<polyline points="{points}" fill="none" {style}/>'

    def draw_text(x: float, y: float, text: str, anchor: str = "start") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'

    means = [fmean(losses[max(0, stop - WINDOW) : stop]) for stop in range(1, len(losses) + 1)]
    steps = [len(losses) * part // 4 for part in range(5)]
    heights = {loss: place(0, loss)[1] for loss in range(low, high + 1)}
    x, _ = place(interrupted_at, low)
    grid = "".join(f"M60 {y:.1f}h720" for y in heights.values())
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 450" font-family="sans-serif" font-size="14">',
        '<rect width="800" height="450" fill="white"/>',
        f'<path d="{grid}" stroke="gainsboro"/>',
        f'<path d="M{x:.1f} 40v360" stroke="gray" stroke-dasharray="4"/>',
        draw_text(60, 24, f"training loss at each step; thick: mean of {WINDOW} steps"),
        draw_text(x + 6, 56, f"interrupted and resumed at step {interrupted_at}"),
        *(draw_text(52, y + 5, str(loss), "end") for loss, y in heights.items()),
        *(draw_text(place(step, low)[0], 422, str(step), "middle") for step in steps),
        draw_line(losses, 'stroke="lightsteelblue"'),
        draw_line(means, 'stroke="steelblue" stroke-width="3"'),
        "</svg>\n",
    ]
    (FOLDER / "loss.svg").write_text("\n".join(parts), encoding="utf-8")


def verify() -> bool:
    """Run `plait verify` on the same model; whether it passed."""
    tell("Verifying the sharded model against the unsharded one")
    console.print(f"  $ plait verify {CONFIG} --json > {FOLDER / 'verify.json'}")
    command = [sys.executable, "-m", "plait", "verify", str(CONFIG), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    (FOLDER / "verify.json").write_text(done.stdout, encoding="utf-8")
    if done.stdout:
        console.print(f"  {json.loads(done.stdout)['verdict']}", markup=False)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
