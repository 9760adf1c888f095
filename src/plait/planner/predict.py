"""Predict the step of one plan."""

from plait.config.model import ModelConfig
from plait.planner.cluster import Cluster
from plait.planner.plan_config import PlanConfig
from plait.planner.prediction import Prediction


def predict(model: ModelConfig, cluster: Cluster, plan: PlanConfig, *, seq_len: int, global_batch: int) -> Prediction:
    """What one optimizer step of `global_batch` sequences takes; equal arguments give equal predictions.

    Raises:
        ConfigError: a batch that does not divide, degrees that do not multiply to the devices, or a constant that the
            catalog lacks.
        ShardingError: a degree that the model cannot be cut into.
    """
    raise NotImplementedError
