"""Training: tokens from files, AdamW, accumulation, metrics, checkpoints and exact resume."""
