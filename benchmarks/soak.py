"""Kill random ranks of a training run at random times, and compare its end with an undisturbed run's, bit for bit.

A small Llama is trained on the source of Python's standard library, with a checkpoint every few steps, by `plait train`
with `train.max_restarts`. Once in every life of its ranks one of them gets SIGKILL: while they start, in a step or in a
save. The run has to end with the same losses and the same checkpoint as one that nothing happens to.

    python benchmarks/soak.py --out benchmarks/soak.json
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from plait.bench.machine import describe_machine
from plait.checkpoint.names import INDEX, METADATA

VOCAB_SIZE = 512
CORPUS_BYTES = 1_000_000
CHECKPOINT_EVERY = 5
MOST_STEPS_OF_A_LIFE = 9
"""To be waited for; then it ends within the next, or a few later where steps take less time than looking for them."""
STEPS_PER_KILL = 15
"""So many that the run cannot end before its last kill, however fast its steps are."""
IN_START_UP = 0.3
"""The part of the kills that come before the first step of a life."""
PATIENCE_S = 600.0
"""For ranks to start on a busy machine."""

CONFIG = """\
name = "soak"
seed = 5
[model]
preset = "llama-tiny"
vocab_size = {vocab_size}
[parallel]
tp = {tp}
# How GEMMs are cut is said: the cost model may choose otherwise after a restart, and rounding with it.
[overlap]
policy = "full"
method = "direct"
chunks = 1
[precision]
compute = "float32"
[data]
kind = "text"
paths = ["../corpus"]
tokenizer = "../tokenizer.json"
[train]
steps = {steps}
seq_len = 64
micro_batch_size = 4
learning_rate = 2e-3
warmup_steps = 10
checkpoint_every = {checkpoint_every}
keep_checkpoints = 2
max_restarts = {max_restarts}
"""


def main() -> None:
    """Run both and write the result; exit status 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which nobody is killed any more")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of who is killed when")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="is removed first")
    parser.add_argument("--out", type=Path, help="where to write the result")
    given = parser.parse_args()
    result = soak(given.folder, given.kills, given.seconds, given.tp, given.seed)
    text = json.dumps(result, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")
    sys.exit(0 if result["equal"] else 1)


def soak(folder: Path, num_kills: int, limit_s: float, tp: int, seed: int) -> dict[str, Any]:
    """Train twice, the second time with kills; what happened."""
    shutil.rmtree(folder, ignore_errors=True)
    write_corpus(folder)
    config = CONFIG.format(
        vocab_size=VOCAB_SIZE, tp=tp, steps=STEPS_PER_KILL * num_kills, checkpoint_every=CHECKPOINT_EVERY,
        max_restarts=num_kills,
    )  # fmt: skip
    undisturbed, killed = (Life(folder / name, config, tp) for name in ("undisturbed", "killed"))
    expected = undisturbed.finish()
    started = time.monotonic()
    found = kill_at_random(killed, num_kills, limit_s, random.Random(seed))
    elapsed_s = time.monotonic() - started
    is_same_loss = killed.read_metrics() == undisturbed.read_metrics()
    files = compare_files(Path(expected["checkpoint"]), undisturbed.folder, killed.folder)
    log = killed.read_log()
    lost = [int(number) for number in re.findall(r"(\d+) steps? (?:is|are) lost: restart", log)]
    return {
        "what": "kill -9 of random ranks at random times; the run goes on by itself",
        "tp": tp,
        "steps": expected["step"],
        "checkpoint_every": CHECKPOINT_EVERY,
        "kills": found.total(),
        "kills_in_start_up": found["start-up"],
        "kills_in_training": found["training"],
        "kills_while_agreeing": len(re.findall(r"died: killed by SIGKILL\n +last collective .*\(share\)", log)),
        "restarts": log.count(f" of {num_kills}\n"),
        "steps_repeated": sum(lost),
        "left_behind": killed.list_leftovers(),
        "final_loss": expected["loss"],
        "same_losses": is_same_loss,
        "same_files": files,
        "equal": is_same_loss and all(files.values()) and bool(files),
        "elapsed_s": round(elapsed_s, 1),
        "seed": seed,
        "machine": describe_machine(),
    }


@dataclass
class Life:
    """A run in a folder of its own."""

    folder: Path
    config: str
    num_ranks: int
    process: "subprocess.Popen[str]" = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        (self.folder / "soak.toml").write_text(self.config)

    @property
    def metrics(self) -> Path:
        return self.folder / "runs/soak/metrics.jsonl"

    def start(self) -> None:
        """Start `plait train`."""
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "plait", "train", "soak.toml"],
                cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=log,
                text=True,
            )  # fmt: skip

    def finish(self) -> dict[str, Any]:
        """Wait for its end, started now unless it was; its summary."""
        if not hasattr(self, "process"):
            self.start()
        printed, _ = self.process.communicate()
        if self.process.returncode:
            sys.exit(f"plait train ended with status {self.process.returncode}:\n{self.read_log()[-4000:]}")
        summary: dict[str, Any] = json.loads(printed)
        return summary

    def read_log(self) -> str:
        return (self.folder / "log").read_text()

    def read_metrics(self) -> list[tuple[int, float, float]]:
        """Step, loss and gradient norm."""
        records = map(json.loads, self.metrics.read_text().splitlines())
        return [(record["step"], record["loss"], record["grad_norm"]) for record in records]

    def list_ranks(self) -> list[int]:
        """Processes of its ranks."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def list_leftovers(self) -> list[str]:
        """Half-written files, and memory with the name of a process that is gone."""
        memory = Path("/dev/shm").glob("plait-*")
        nobodys = [path for path in memory if not Path("/proc", path.name.split("-")[1]).exists()]
        return [str(path) for path in [*self.folder.rglob(".writing-*"), *nobodys]]


def kill_at_random(life: Life, num_kills: int, limit_s: float, draw: random.Random) -> Counter[str]:
    """Kill one rank in each life of the ranks, then let the run end; how many were killed when."""
    found: Counter[str] = Counter()
    before: set[int] = set()
    start_s = 0.0
    life.start()
    deadline = time.monotonic() + limit_s
    for number in range(num_kills):
        if time.monotonic() > deadline:
            break
        file_before = identify_file(life.metrics)
        ranks = wait_for_ranks(life, before)
        begun = time.monotonic()
        if start_s and draw.random() < IN_START_UP:
            when = "start-up"
            wait_for_file(life, file_before, limit_s=draw.uniform(0, start_s))
        else:
            when = "training"
            wait_for_file(life, file_before)
            start_s = start_s or time.monotonic() - begun
            step_s = wait_for_steps(life, draw.randint(1, MOST_STEPS_OF_A_LIFE))
            time.sleep(draw.random() * step_s)
        os.kill(draw.choice(ranks), signal.SIGKILL)
        found[when] += 1
        before |= set(ranks)
        print(f"kill {number + 1}, {when}, step {count_lines(life.metrics)}", file=sys.stderr, flush=True)
    life.finish()
    return found


def wait_for_ranks(life: Life, before: set[int]) -> list[int]:
    """Ranks that were not there before, all of them."""
    wait_until(life, lambda: len(set(life.list_ranks()) - before) == life.num_ranks)
    return sorted(set(life.list_ranks()) - before)


def identify_file(path: Path) -> int:
    """Changes when a run that goes on writes its metrics afresh."""
    return path.stat().st_ino if path.exists() else 0


def wait_for_file(life: Life, before: int, limit_s: float = float("inf")) -> None:
    """Wait until the run writes to another metrics file than `before`, or for so long."""
    end = time.monotonic() + limit_s
    wait_until(life, lambda: time.monotonic() > end or identify_file(life.metrics) not in (0, before))


def wait_for_steps(life: Life, num_steps: int) -> float:
    """Wait for so many more steps; how long each has taken."""
    first, begun = count_lines(life.metrics), time.monotonic()
    wait_until(life, lambda: count_lines(life.metrics) >= first + num_steps)
    return (time.monotonic() - begun) / num_steps


def count_lines(path: Path) -> int:
    """The steps that are in the metrics."""
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def wait_until(life: Life, is_so: Callable[[], bool]) -> None:
    """Look again and again while the run goes on; the end of this program if it does not."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        if life.process.poll() is not None or time.monotonic() > deadline:
            life.process.kill()
            sys.exit(f"the run ended, or hangs, before its last kill:\n{life.read_log()[-4000:]}")
        time.sleep(0.005)


def compare_files(checkpoint: Path, *folders: Path) -> dict[str, bool]:
    """By name, whether the files of the last checkpoint have the same bytes in all folders; of the index, what it says.

    In the metadata of torch each save has a number drawn at random, so it and its checksum are left out.
    """
    names = {path.relative_to(folder) for folder in folders for path in (folder / checkpoint).rglob("*")}
    found = {}
    for name in sorted(names):
        if name.name != METADATA:
            paths = [folder / name for folder in folders]
            found[name.name] = all(map(Path.exists, paths)) and len({_read_lasting(path) for path in paths}) == 1
    return found


def _read_lasting(path: Path) -> bytes:
    if path.name != INDEX:
        return path.read_bytes()
    index = json.loads(path.read_text())
    lasting = {key: index[key] for key in ("format", "step", "state")}
    return json.dumps(lasting).encode()


def write_corpus(folder: Path) -> None:
    """The source of modules of the standard library as text, and a byte-level BPE trained on it."""
    corpus, size = folder / "corpus", 0
    corpus.mkdir(parents=True)
    documents = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if not text or size > CORPUS_BYTES:
            continue
        size += len(text)
        documents.append(text)
        (corpus / f"{path.stem}.txt").write_text(text, encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
