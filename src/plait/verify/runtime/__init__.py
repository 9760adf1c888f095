"""Checks that run the model, sharded and unsharded."""
