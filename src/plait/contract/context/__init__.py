"""What attention over a context axis computes and moves on each rank, without torch."""
