"""Precision recipes of a model: which linears are quantized, by which scales and random numbers."""
