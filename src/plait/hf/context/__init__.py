"""Hugging Face models over a context axis: attention by way of transformers' own interface, positions, refusals."""
