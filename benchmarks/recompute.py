"""What computing blocks again in backward saves and costs: memory to the byte, beside what the planner says, and time.

A Llama (fused attention) and a GPT-2 with dropout of attention probabilities (which then exist whole), two ranks over
shared memory, one training step without the optimizer. `block_bytes` is what one block keeps between forward and
backward: the difference of two models that differ in their number of blocks. `peak_bytes` is the most that tensors take
at once beside parameters and gradients. Both are read off the tensors that operations make, of the rank that has most.
Times are of whole steps, in interleaved rounds, each rank with one thread; a ratio is taken within a round.

    python benchmarks/recompute.py        # writes recompute.json beside itself
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.bench.live_memory import LiveMemory
from plait.bench.machine import describe_machine
from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.config.overlap import OverlapConfig
from plait.config.precision import PrecisionConfig
from plait.config.train import Recompute, TrainConfig
from plait.contract.model import derive_model, derive_plan
from plait.contract.report.tally import build_tally
from plait.contract.setting import Setting
from plait.models.blocks import prepare_blocks
from plait.models.init import initialize
from plait.models.registry import build_model
from plait.parallel.apply import mesh_of, parallelize
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.parallel.loss import vocab_parallel_cross_entropy
from plait.planner.memory.peak import derive_layer_bytes, derive_stage_parts
from plait.planner.plan_config import PlanConfig
from plait.planner.planned import derive_planned_model
from plait.planner.prediction import MemoryPart
from plait.planner.stages import derive_stages
from plait.sharding import MeshShape

TP = 2
MODES: tuple[Recompute, ...] = get_args(Recompute)
ACTIVATIONS = (MemoryPart.ACTIVATIONS, MemoryPart.ENDS, MemoryPart.BUFFERS)
"""What the planner counts beside parameters, gradients, optimizer and libraries."""


def main() -> None:
    """Measure, write the result and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds of steps")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    machine = describe_machine()  # first, so that the load average is that of others
    size = (given.batch, given.seq_len)
    results = {}
    with LocalRanks(TP, timeout_s=300, device_type="cpu") as ranks:
        for name, config in build_configs(given.layers, given.width, given.seq_len).items():
            measured = ranks.call(measure, config=config, size=size, rounds=given.rounds)
            results[name] = {mode: join(config, size, mode, [each[mode] for each in measured]) for mode in MODES}
    record = {
        "what": (__doc__ or "").partition("\n")[0],
        "machine": machine | {"threads_per_rank": 1},
        "tp": TP,
        "rounds": given.rounds,
        "model": {"layers": given.layers, "width": given.width, "batch": given.batch, "seq_len": given.seq_len},
        "results": results,
    }
    given.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def build_configs(num_layers: int, width: int, seq_len: int) -> dict[str, ModelConfig]:
    """By name."""
    heads = width // 64
    sizes: dict[str, Any] = {"num_layers": num_layers, "width": width, "vocab_size": 1024, "max_seq_len": seq_len}
    return {
        "llama": LlamaConfig(num_heads=heads, num_kv_heads=heads, mlp_width=8 * width // 3 // 64 * 64, **sizes),
        "gpt with attention dropout": GptConfig(num_heads=heads, attention_dropout=0.1, dropout=0.1, **sizes),
    }


def measure(config: ModelConfig, size: tuple[int, int], rounds: int) -> dict[Recompute, dict[str, Any]]:
    """On one rank: bytes and seconds of each mode."""
    torch.set_num_threads(1)
    found: dict[Recompute, dict[str, Any]] = {}
    for mode in MODES:
        fewer = config.model_copy(update={"num_layers": config.num_layers - 1})
        (kept, peak), (kept_of_fewer, _) = (measure_bytes(build(each, mode), size) for each in (config, fewer))
        found[mode] = {"block_bytes": kept - kept_of_fewer, "peak_bytes": peak, "step_s": []}
    models = {mode: build(config, mode) for mode in MODES}
    for number in range(rounds + 1):
        for mode, model in models.items():
            dist.barrier()
            start = time.perf_counter()
            compute_loss(model, size).backward()
            if number:
                found[mode]["step_s"].append(time.perf_counter() - start)
    return found


def build(config: ModelConfig, mode: Recompute) -> nn.Module:
    """A model with gradients that are there already, as in training."""
    mesh = build_mesh(MeshShape(tp=TP), shared_memory=True)
    model = parallelize(build_model(config, device="meta"), mesh, derive_plan(config))
    model.to_empty(device=mesh.device)
    initialize(model, config, seed=0)
    prepare_blocks(model, TrainConfig(recompute=mode), mesh)
    seed_dropout(model, 0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    return model


def compute_loss(model: nn.Module, size: tuple[int, int]) -> Tensor:
    """Of one micro-batch."""
    mesh, vocab_size = mesh_of(model), 1024
    assert mesh is not None
    tokens = (torch.arange(size[0] * size[1]) * 7 % vocab_size).view(size)
    set_dropout_offset(model, 0)
    return vocab_parallel_cross_entropy(model(tokens), tokens.flatten().roll(-1), mesh, vocab_size=vocab_size)


def measure_bytes(model: nn.Module, size: tuple[int, int]) -> tuple[int, int]:
    """What is kept between forward and backward, and the most there is at once."""
    with LiveMemory() as memory:
        loss = compute_loss(model, size)
        gc.collect()
        kept = memory.now_bytes
        loss.backward()
    return kept, memory.peak_bytes


def join(config: ModelConfig, size: tuple[int, int], mode: Recompute, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks measured, beside what the planner and the contract say."""
    setting = Setting(*size, tp=TP, dtype="float32", recompute=mode)
    tally = build_tally(derive_model(config, setting).block)
    planned = plan_bytes(config, size, mode)
    return {
        "block_bytes": {"measured": max(each["block_bytes"] for each in ranks), "planned": planned[0]},
        "peak_bytes": {"measured": max(each["peak_bytes"] for each in ranks), "planned": planned[1]},
        "block_flops": tally.flops,
        "block_sent_bytes": tally.forward.sent_bytes + tally.backward.sent_bytes,
        "step_s": {"median": statistics.median(ranks[0]["step_s"]), "fastest": min(ranks[0]["step_s"])},
    }


def plan_bytes(config: ModelConfig, size: tuple[int, int], mode: Recompute) -> tuple[float, float]:
    """What a block keeps, and the most that is there beside parameters and gradients."""
    plan = PlanConfig(
        tp=TP,
        micro_batch=size[0],
        recompute=mode,
        sharded="nothing",
        overlap=OverlapConfig(),
        precision=PrecisionConfig(compute="float32"),
        fused_attention=not (isinstance(config, GptConfig) and config.attention_dropout),
    )
    contract = derive_planned_model(config, plan, size[1])
    layer = derive_layer_bytes(contract, plan)
    (stage,) = derive_stages(config.num_layers, plan.build_order(1))
    parts = derive_stage_parts(contract, plan, stage, layer)
    return layer.block, sum(parts[part] for part in ACTIVATIONS)


if __name__ == "__main__":
    main()
