"""Small models, plans and clusters for tests of the planner."""

from plait.config.model import GptConfig, LlamaConfig
from plait.config.presets import load_preset
from plait.planner.cluster import Cluster
from plait.planner.hardware import Hardware, load_hardware
from plait.planner.plan_config import PlanConfig
from plait.planner.predict import predict
from plait.planner.prediction import Prediction

LLAMA = load_preset("llama3-8b")
GPT = load_preset("gpt-22b")
MODELS: tuple[LlamaConfig | GptConfig, ...] = (LLAMA, GPT)

SEQ_LEN = 2048


def predict_small(
    plan: PlanConfig,
    *,
    model: LlamaConfig | GptConfig = LLAMA,
    hardware: Hardware | None = None,
    batches: int = 4,
    seq_len: int = SEQ_LEN,
) -> Prediction:
    """A plan with so many micro-batches on as many H100s as it takes."""
    cluster = Cluster(hardware or load_hardware("h100"), plan.num_devices)
    return predict(model, cluster, plan, seq_len=seq_len, global_batch=batches * plan.dp * plan.micro_batch)
