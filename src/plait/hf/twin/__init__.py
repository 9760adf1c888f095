"""What takes the place of a Hugging Face model's modules, and what a call of such a model means."""
