"""Ranks and what they send each other: launch, mesh, collectives, transitions as autograd functions, and their trace."""
