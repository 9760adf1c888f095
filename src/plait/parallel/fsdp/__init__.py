"""Parameters that data-parallel ranks share out: torch's FSDP2 (Zhao et al., 2304.11277) on the local parts of tp.

apply.py   a model's blocks and root become its units
step.py    units that a pipeline gathers and reduces once a step
moves.py   what it moves, issued by `plait.comm`
local.py   the plain tensor that a rank has of a parameter
"""
