"""Low-rank adapters of peft (Hu et al., arXiv:2106.09685) on a parallel Hugging Face model: their cut, start, files."""
