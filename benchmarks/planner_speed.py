"""How long the planner takes on one core: a prediction of sizes it has not seen, and the search of a whole space.

Targets: a prediction under 10 ms, everything for 4,096 GPUs under 10 s.

    python benchmarks/planner_speed.py        # writes planner_speed.json beside itself
"""

import json
import statistics
import time
from pathlib import Path

from plait.bench.machine import describe_machine
from plait.config.presets import load_preset
from plait.planner import plan, predict
from plait.planner.cluster import Cluster
from plait.planner.hardware import load_hardware
from plait.planner.plan_config import PlanConfig

NUM_PREDICTIONS = 30
NUM_SEARCHES = 3
SEQ_LEN = 8192


def main() -> None:
    """Measure both, in CPU seconds and on the clock."""
    machine = describe_machine()
    result = {
        "what": (__doc__ or "").partition("\n")[0],
        "machine": machine,
        "prediction_s": measure_predictions(),
        "search_4096_gpus_s": [measure_search(micro) for micro in range(NUM_SEARCHES)],
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def measure_predictions() -> dict[str, float]:
    """Of sizes that nothing is kept of; the first loads the catalog."""
    model, cluster = load_preset("llama3-70b"), Cluster(load_hardware("h100"), 64)
    chosen = PlanConfig(tp=8, pp=4, dp_shard=2, interleave=5)
    taken_s = []
    for index in range(NUM_PREDICTIONS):
        start_s = time.perf_counter()
        predict(model, cluster, chosen, seq_len=SEQ_LEN - 64 * index, global_batch=128)
        taken_s.append(time.perf_counter() - start_s)
    return {"first": taken_s[0], "median": statistics.median(taken_s), "least": min(taken_s)}


def measure_search(index: int) -> dict[str, float]:
    """The whole of `plan`, each time of sequences of another length, so that nothing is kept."""
    model, cluster = load_preset("llama3-70b"), Cluster(load_hardware("h100"), 4096)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    report = plan(model, cluster, seq_len=SEQ_LEN - 512 * index, global_batch=2048)
    return {
        "wall": time.perf_counter() - start_s,
        "cpu": time.process_time() - start_cpu_s,
        "plans": report.num_considered,
    }


if __name__ == "__main__":
    main()
