"""The learning rate of every step."""

from math import cos, pi

from plait.config.train import TrainConfig


def derive_learning_rate(step: int, config: TrainConfig) -> float:
    """Rise linearly over the warm-up, then fall along half a cosine to the minimum, reached at the last step.

    `step` counts from 0; the first step of a warm-up already moves.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    lowest = config.min_learning_rate_ratio
    return config.learning_rate * (lowest + (1 - lowest) * (1 + cos(pi * min(1.0, progress))) / 2)
