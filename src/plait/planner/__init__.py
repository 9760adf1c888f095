"""What a run will cost, before it: predictions of time and memory from contracts, schedules and a catalog.

model, cluster = load_preset("llama3-70b"), Cluster(load_hardware("h100"), num_devices=256)
report = plan(model, cluster, seq_len=8192, global_batch=512)       every plan, ranked
report.best.step_s, report.best.memory.verdict                      seconds, and whether it fits
why_not(report, "tp=16").reason
predict(model, cluster, report.best.plan, seq_len=8192, global_batch=512)
"""

from plait.planner.cluster import Cluster
from plait.planner.hardware import Hardware, list_hardware, load_hardware
from plait.planner.plan import PlanReport, plan
from plait.planner.plan_config import PlanConfig
from plait.planner.predict import predict
from plait.planner.prediction import Prediction, Verdict
from plait.planner.why_not import WhyNot, why_not

__all__ = [
    "Cluster",
    "Hardware",
    "PlanConfig",
    "PlanReport",
    "Prediction",
    "Verdict",
    "WhyNot",
    "list_hardware",
    "load_hardware",
    "plan",
    "predict",
    "why_not",
]
