"""What a tensor-parallel server costs: time to the first token, time per token, and memory.

report = plan_inference(model, cluster, batch=8, prompt_len=2048, generate_len=256)
report.fastest.time_per_output_token_s
prediction = predict_inference(model, cluster, ServerConfig(tp=8), Load(batch=8, prompt_len=2048, generate_len=256))
"""

from plait.planner.inference.memory import InferenceMemory, InferenceMemoryPart
from plait.planner.inference.plan import InferenceDegree, InferenceReport, plan_inference
from plait.planner.inference.predict import predict_inference
from plait.planner.inference.prediction import InferencePrediction
from plait.planner.inference.record import build_inference_record, build_prediction_record
from plait.planner.inference.server import Load, ServerConfig
from plait.planner.inference.table import build_inference_tables
from plait.planner.inference.term import Term

__all__ = [
    "InferenceDegree",
    "InferenceMemory",
    "InferenceMemoryPart",
    "InferencePrediction",
    "InferenceReport",
    "Load",
    "ServerConfig",
    "Term",
    "build_inference_record",
    "build_inference_tables",
    "build_prediction_record",
    "plan_inference",
    "predict_inference",
]
