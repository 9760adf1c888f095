"""Sharded checkpoints: every tensor with its global name, shape and intervals, readable at any tp degree."""
