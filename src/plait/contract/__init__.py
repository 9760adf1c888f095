"""What each operation promises: layouts, local shapes, collectives, FLOPs and bytes, forward and backward, without torch."""
