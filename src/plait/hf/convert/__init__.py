"""From a directory of Hugging Face to a sharded checkpoint of ours, and back, a tensor at a time."""
