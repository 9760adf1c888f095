"""Models of Hugging Face in a config: their `config.json`, read and written; training them further, with adapters."""
