"""Predictions beside published measurements, and beside a null model that knows nothing but FLOPs."""
