"""Whether a verification fits this machine, known before any rank is started."""

from math import prod
from pathlib import Path

from plait.checkpoint.weights import WeightFiles
from plait.config.model import ModelConfig
from plait.config.run import AnyRun, FineTuneConfig, RunConfig
from plait.errors import ConfigError
from plait.units import format_bytes

_BYTES_PER_PARAMETER = 110
"""Of all processes together, 100 at the peak when measured: parameters, gradients, their copies and updates in float64;
the ranks' parameters, gradients, moments and the copies they send; what is read back."""

_QUANTIZED = 2
"""Times as many under a recipe: the ranks compute in float64 too, and the steps without the recipe are kept."""

_BYTES_PER_PROCESS = 300 * 10**6
"""Torch itself."""

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
    return _count_bytes(config, model.num_parameters, model.vocab_size)


def _count_bytes(config: AnyRun, num_parameters: int, vocab_size: int) -> int:
    logits = config.tokens_per_step * vocab_size
    shape = config.parallel.mesh_shape
    processes = (1 + shape.world_size) * _BYTES_PER_PROCESS
    times = 1 if config.quantization.resolved is None else _QUANTIZED
    return times * (num_parameters * _BYTES_PER_PARAMETER + logits * _BYTES_PER_LOGIT) + processes


def check_directory_memory(config: FineTuneConfig) -> None:
    """The same for a run that trains a directory further, whose weights are read as they are.

    Raises:
        ConfigError: it does not fit.
    """
    entries = WeightFiles.from_folder(Path(config.model.path)).entries.values()
    number = sum(prod(entry.spec.shape) for entry in entries)
    needed, available = _count_bytes(config, number, config.model.vocab_size), _available_bytes()
    if needed > available:
        raise ConfigError(
            f"verify: {number:,} parameters, sharded and as the unsharded model in float64, need about "
            f"{format_bytes(needed)}, and {format_bytes(available)} of this machine's memory are free",
            hint="use more memory, or a smaller model of the same architecture",
        )


def _with_layers(model: ModelConfig, num_layers: int) -> ModelConfig:
    return model.model_copy(update={"num_layers": num_layers})


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line")
