"""Ranks and what they send each other: launch, mesh, collectives, differentiable transitions, and their trace."""
