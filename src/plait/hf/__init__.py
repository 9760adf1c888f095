"""Hugging Face models: their plans, their parallel form, their files."""
