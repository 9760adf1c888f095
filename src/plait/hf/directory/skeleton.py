"""A model of Hugging Face without its weights: parameters on the meta device, everything that is computed in place."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ConfigError
from plait.hf.library import import_library, load_config, load_generation_config


def build_skeleton(path: Path, *, dtype: torch.dtype | None = None) -> nn.Module:
    """The causal language model of a directory, with parameters on the meta device, in `dtype` or that of its config.

    Raises:
        ConfigError: the directory has no usable config, or the architecture is no causal language model.
    """
    config = load_config(path)
    model = build_from_config(config, dtype=dtype)
    generation = load_generation_config(path)
    if generation is not None:
        model.generation_config = generation
    return model


def build_from_config(config: Any, *, dtype: torch.dtype | None = None) -> nn.Module:
    """As `build_skeleton`, of a config of transformers.

    Raises:
        ConfigError: the architecture is no causal language model.
    """
    transformers = import_library()
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        said = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"model_type {config.model_type}: is no causal language model that is known: {said}"
        ) from error
    except Exception as error:  # whatever a model's constructor makes of values that cannot be
        said = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"model_type {config.model_type}: the model cannot be built from its config.json: "
            f"{type(error).__name__}: {said}",
            hint="compare it with the config of a model of this type that works",
        ) from error
    compute_buffers(model)
    return model.eval()


@torch.no_grad()
def compute_buffers(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Give the buffers that no checkpoint holds (rotary frequencies, scales) memory, and their values.

    They are computed as transformers computes them when it loads a model that it built on the meta device.
    """
    owners: dict[nn.Module, None] = {}
    for module, name, buffer in list_computed_buffers(model):
        if buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)
            owners[module] = None
    for module in owners:
        model._init_weights(module)  # type: ignore[operator]


def list_computed_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Module, name and value of each buffer that is not saved."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name in module._non_persistent_buffers_set:
                yield module, name, buffer


def list_saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """FQN and value of each buffer that is saved."""
    computed = {(id(module), name) for module, name, _ in list_computed_buffers(model)}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and (id(module), name) not in computed:
                yield f"{prefix}.{name}".lstrip("."), buffer


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> None:
    """Give every parameter and saved buffer on the meta device memory on `device`; what was tied stays tied."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or not param.is_meta:
                continue
            if param not in made:
                empty = torch.empty(param.shape, dtype=param.dtype, device=device)
                made[param] = nn.Parameter(empty, requires_grad=param.requires_grad)
            module._parameters[name] = made[param]
        for name, buffer in module._buffers.items():
            if buffer is not None and (buffer.is_meta or buffer.device != device):
                moved = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                module._buffers[name] = moved
