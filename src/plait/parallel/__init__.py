"""The parallel twins of a model's modules, and what a training loop needs beside them."""
