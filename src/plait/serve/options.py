"""What `plait serve` is told."""

from dataclasses import dataclass, field
from pathlib import Path

from plait.config.overlap import Policy


@dataclass(frozen=True)
class ServeOptions:
    """How one model is served."""

    folder: Path
    """A Hugging Face model: config, weights and tokenizer."""
    tp: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    """0 for a free one."""
    api_key: str | None = field(default=None, repr=False)
    model_name: str = ""
    """What clients call the model; the name of the directory if empty."""
    max_batch: int = 32
    """Sequences that are generated together."""
    max_queue: int = 256
    """Sequences that may wait beside them; what comes then is refused."""
    max_cache_tokens: int = 65_536
    """Tokens that the KV cache has room for."""
    max_model_len: int | None = None
    """Tokens of a prompt with its answer; None for what the model takes."""
    dtype: str = "float32"
    """Of the weights."""
    overlap: Policy = "disabled"
    """Of collectives with GEMMs, where prompts are read."""
    grace_s: float = 30.0
    """For what is under way, when asked to stop."""
    log_requests: bool = False

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.model_name or self.folder.resolve().name
