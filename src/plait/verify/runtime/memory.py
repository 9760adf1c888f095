"""Whether a verification fits this machine, known before any rank is started."""

from pathlib import Path

from plait.config.model import ModelConfig
from plait.config.run import RunConfig
from plait.errors import ConfigError
from plait.units import format_bytes

_BYTES_PER_PARAMETER = 84
"""fp64 twin: parameter, gradient, two moments 32; reordered fp32 model 16; the ranks together: parameter, gradient, its
copy, two moments, initial and integer copies 24; their results, as files and as read back, 12."""

_BYTES_PER_LOGIT = 48
"""fp64 logits, their softmax and gradient, the same in fp32 twice over."""


def check_memory(config: RunConfig) -> None:
    """Compare what a verification needs with what is free.

    Raises:
        ConfigError: it does not fit; the hint names a number of layers that does.
    """
    needed, available = _estimate_bytes(config, config.model), _available_bytes()
    if needed <= available:
        return
    fewer = [layers for layers in (1, 2, 4, 8, 16, 32) if layers < config.model.num_layers]
    fitting = [layers for layers in fewer if _estimate_bytes(config, _with_layers(config.model, layers)) <= available]
    one_layer = format_bytes(_estimate_bytes(config, _with_layers(config.model, 1)))
    raise ConfigError(
        f"verify: {config.model.num_parameters:,} parameters, sharded and as unsharded fp64 and reordered twins, "
        f"need about {format_bytes(needed)}, and {format_bytes(available)} of this machine's memory are free",
        hint=f"verify fewer of its identical layers: model.num_layers={fitting[-1]}"
        if fitting
        else f"one layer alone needs {one_layer}; use more memory, or smaller model.vocab_size and model.width",
    )


def _estimate_bytes(config: RunConfig, model: ModelConfig) -> int:
    logits = config.tokens_per_micro_batch * model.vocab_size
    return model.num_parameters * _BYTES_PER_PARAMETER + logits * _BYTES_PER_LOGIT


def _with_layers(model: ModelConfig, num_layers: int) -> ModelConfig:
    return model.model_copy(update={"num_layers": num_layers})


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line")
