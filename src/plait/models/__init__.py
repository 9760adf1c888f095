"""The Llama and GPT-2 families: plain single-device PyTorch, made parallel from outside by `plait.parallelize`.

Tokens are flattened to `[T, D]` between modules, and head counts are read off the projections, so the same code runs on
whole tensors and on the shards of one rank.
"""

from plait.models.init import initialize
from plait.models.registry import build_model

__all__ = ["build_model", "initialize"]
