"""Frozen configs of models and runs, presets, TOML and `key=value` overrides, without torch."""
