"""Generation: sampling, cache, continuous batching over tensor-parallel ranks."""
