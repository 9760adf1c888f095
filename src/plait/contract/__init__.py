"""What each operation promises, without torch: layouts, local shapes, collectives, FLOPs and bytes, both ways."""
