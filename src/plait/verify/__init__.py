"""Checks that a sharded model is the unsharded one and issued the collectives that its contract promised."""
