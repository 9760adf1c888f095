"""Drawing tokens from logits whose vocabulary is cut."""
