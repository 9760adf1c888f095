"""A plan's report of a few predictions, for tests of what is made of it."""

from plait.config.presets import load_preset
from plait.planner.cluster import Cluster
from plait.planner.hardware import load_hardware
from plait.planner.plan import PlanReport, Refusal, TensorDegree, Worse
from plait.planner.plan_config import PlanConfig
from plait.planner.predict import predict
from plait.planner.prediction import Prediction

EVIL = "<script>document.title = 'run'</script><img src=x onerror=alert(1)> & \"so' on"
"""A name that would run if a page did not escape it."""

BEST = PlanConfig(tp=4, pp=2, dp_shard=2)


def build_report(name: str = "llama3-8b", *, best: PlanConfig = BEST, fits: bool = True) -> PlanReport:
    """A few plans on as many H100s as `best` takes; the last tensor degree is made out to be the first worse."""
    model, cluster = load_preset("llama3-8b"), Cluster(load_hardware("h100"), best.num_devices)
    counts = range(1, cluster.num_devices + 1)
    tensor_degrees = [tp for tp in counts if cluster.num_devices % tp == 0]
    same = [predict_one(PlanConfig(tp=tp, dp_shard=cluster.num_devices // tp)) for tp in tensor_degrees]
    layers = [each.step.find("blocks") for each in same]
    degrees = [
        TensorDegree(tp, layer, each, each) for tp, layer, each in zip(tensor_degrees, layers, same, strict=True)
    ]
    before, last = same[-2], same[-1]
    worse = Worse(
        tensor_degrees[-1], tensor_degrees[-2], last.step_s, before.step_s, "communication", last.step_s - before.step_s
    )
    first = predict_one(best)
    return PlanReport(
        name, model, cluster, SEQ_LEN, _count_sequences(best), (first, *same) if fits else (), None if fits else first,
        (Refusal("tp = 5", f"cannot be: {EVIL}"), Refusal("tp = 1, pp = 1", "lacks 12.0 GB", 4)),
        (*degrees, TensorDegree(64, None, None, None, "there are fewer devices")),
        None, worse, worse, num_considered=1234, fixed=("micro_batch = 1",),
    )  # fmt: skip


SEQ_LEN = 4096


def predict_one(plan: PlanConfig) -> Prediction:
    """A plan on as many H100s as it takes."""
    cluster = Cluster(load_hardware("h100"), plan.num_devices)
    return predict(load_preset("llama3-8b"), cluster, plan, seq_len=SEQ_LEN, global_batch=_count_sequences(plan))


def _count_sequences(plan: PlanConfig) -> int:
    return 4 * plan.num_devices
