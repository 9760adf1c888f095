"""plait beside transformers' own tensor parallelism: loading, a fine-tuning step and decoding on two ranks of one host.

The model is a Llama of SmolLM2-135M's sizes (30 layers, width 576, MLP 1536, vocabulary 49,152, tied, float32) with 12
heads and 4 KV heads instead of 9 and 3, which transformers cannot cut in two. It has random weights and is written to a
folder first, which both load. Each side has ranks of its own, of one thread; they take turns, in shuffled rounds.

    python benchmarks/hf.py
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.distributed.configuration_utils import DistributedConfig

import plait
from plait.bench.machine import describe_machine
from plait.config.overlap import OverlapConfig
from plait.generate.open import open_batch
from plait.generate.request import Request, SamplingConfig
from plait.generate.run import run_requests
from plait.hf.load import load_pretrained
from plait.sharding import MeshShape

TP = 2
NUM_TOKENS = 1024
PROMPT_TOKENS = 64
NEW_TOKENS = 64
BATCHES = (1, 8)
SIDES = ("plait", "transformers")
VOCAB_SIZE = 49_152

MODELS: dict[str, Any] = {}
"""On a rank: its model, between calls."""
GENERATORS: dict[str, Any] = {}
"""On a rank: what generates with plait."""


def main() -> None:
    """Measure, write the result and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--overlap", default="auto")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = save_model(Path(folder))
        loading = measure_loading(folder, arguments.overlap, arguments.rounds)
        with plait.LocalRanks(TP) as ours, plait.LocalRanks(TP) as theirs:
            worlds = {"plait": ours, "transformers": theirs}
            for side, ranks in worlds.items():
                ranks.call(load, side=side, folder=folder, overlap=arguments.overlap)
            step = compare(worlds, take_step, arguments.rounds)
            ours.call(open_generator, folder=folder, overlap=arguments.overlap)
            decode = {
                str(batch): compare(worlds, partial(decode_batch, batch=batch), arguments.rounds) for batch in BATCHES
            }
    results = {"loading": loading, "step": step, "decode": decode}
    record = {
        "what": __doc__.partition("\n")[0],
        "machine": machine,
        "model": {"num_parameters": num_parameters, "dtype": "float32"},
        "tp": TP,
        "num_tokens": NUM_TOKENS,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "rounds": arguments.rounds,
        "overlap": arguments.overlap,
        "results": results,
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def save_model(folder: Path) -> int:
    """Write the model as both load it, and return its number of parameters."""
    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCAB_SIZE)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(param.numel() for param in model.parameters())


def measure_loading(folder: str, overlap: str, rounds: int) -> dict[str, Any]:
    """Load in fresh ranks each time: what was read before stays in the page cache, for both alike."""
    found: dict[str, list[list[dict[str, float]]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in shuffled(number):
            with plait.LocalRanks(TP) as ranks:
                found[side].append(ranks.call(load, side=side, folder=folder, overlap=overlap))
    return {
        side: {
            "time_s": median(max(rank["time_s"] for rank in ranks) for ranks in runs),
            "peak_bytes": median(max(rank["peak_bytes"] for rank in ranks) for ranks in runs),
            "kept_bytes": median(max(rank["kept_bytes"] for rank in ranks) for ranks in runs),
        }
        for side, runs in found.items()
    }


def compare(
    worlds: dict[str, plait.LocalRanks], act: Callable[..., dict[str, float]], rounds: int
) -> dict[str, dict[str, float]]:
    """The medians of what `act` finds on the slowest rank; the first round is not counted."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in worlds}
    for number in range(rounds + 1):
        for side in shuffled(number):
            ranks = worlds[side].call(act, side=side)
            if number:
                found[side].append({key: max(rank[key] for rank in ranks) for key in ranks[0]})
    return {side: {key: median(run[key] for run in runs) for key in runs[0]} for side, runs in found.items()}


def shuffled(seed: int) -> list[str]:
    """The sides in the order of a round."""
    return random.Random(seed).sample(SIDES, len(SIDES))


def median(values: Any) -> float:
    """Of anything that can be iterated."""
    return statistics.median(list(values))


# --- on a rank ---


def load(side: str, folder: str, overlap: str) -> dict[str, float]:
    """Load the model of `side` until every parameter has been read; how long it takes, and memory at most and after."""
    before = read_status("VmRSS")
    with Peak() as peak:
        start = time.perf_counter()
        MODELS[side] = load_plait(folder, overlap) if side == "plait" else load_transformers(folder)
        # transformers maps the file and reads what is used when it is used.
        for param in MODELS[side].parameters():
            float(getattr(param, "_local_tensor", param).detach().sum())
        dist.barrier()
        time_s = time.perf_counter() - start
    return {"time_s": time_s, "peak_bytes": peak.num_bytes, "kept_bytes": read_status("VmRSS") - before}


def load_plait(folder: str, overlap: str) -> nn.Module:
    """Every rank reads its own slices."""
    mesh = plait.build_mesh(MeshShape(tp=TP))
    return load_pretrained(folder, mesh, overlap=OverlapConfig.model_validate(overlap))


def load_transformers(folder: str) -> nn.Module:
    """As its documentation says."""
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": str(TP)}
    config = DistributedConfig(tp_size=TP, tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32)


def open_generator(folder: str, overlap: str) -> None:
    """Load the model again, to generate with it."""
    MODELS["plait"] = None
    mesh = plait.build_mesh(MeshShape(tp=TP), shared_memory=True)
    GENERATORS["plait"] = open_batch(folder, mesh, overlap=OverlapConfig.model_validate(overlap))


def take_step(side: str) -> dict[str, float]:
    """Forward and backward of one sequence, and the peak of memory beside the model and its gradients."""
    model = MODELS[side].train()
    model.zero_grad(set_to_none=False)
    tokens = torch.randint(VOCAB_SIZE, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    dist.barrier()
    with Peak() as peak:
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        dist.barrier()
        time_s = time.perf_counter() - start
    return {"time_s": time_s, "peak_bytes": peak.num_bytes, "loss": float(loss.detach())}


def decode_batch(side: str, batch: int) -> dict[str, float]:
    """Continue prompts of one length, greedily; tokens a second of all of them, the reading of the prompts included."""
    prompts = torch.randint(3, VOCAB_SIZE, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(batch))
    dist.barrier()
    start = time.perf_counter()
    with torch.inference_mode():
        tokens = continue_plait(prompts) if side == "plait" else continue_transformers(prompts)
    time_s = time.perf_counter() - start
    return {"time_s": time_s, "tokens_per_s": batch * NEW_TOKENS / time_s, "sum_of_ids": float(tokens)}


def continue_plait(prompts: Tensor) -> int:
    """By a continuous batch."""
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [Request(str(row), tuple(prompt), sampling) for row, prompt in enumerate(prompts.tolist())]
    answers, _ = run_requests(GENERATORS["plait"], requests, lambda _: None)
    return sum(sum(answer.tokens) for answer in answers.values())


def continue_transformers(prompts: Tensor) -> int:
    """By `generate`."""
    found = (
        MODELS["transformers"]
        .eval()
        .generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
        )
    )
    return int(found[:, PROMPT_TOKENS:].sum())


class Peak:
    """How much resident memory of this process grows at most while the block runs, pages of mapped files included."""

    num_bytes = 0

    def __enter__(self) -> "Peak":
        self._before = read_status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return self

    def __exit__(self, *_: object) -> None:
        self.num_bytes = read_status("VmHWM") - self._before


def read_status(key: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
