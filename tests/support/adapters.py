"""Small models with adapters of peft, whose matrices are all random (also those that begin as zeros)."""

import warnings
from typing import Any

import torch
from torch import nn

from tests.support.architectures import build_model


def add_adapters(model: Any, *, wrapped: bool = True, names: tuple[str, ...] = ("default",), **fields: Any) -> Any:
    """The model with adapters, as a model of peft unless it is only to be injected."""
    import peft

    # Of the versions installed, one calls what is deprecated in the other.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
    targets = {"r": 4, "target_modules": "all-linear", "fan_in_fan_out": model.config.model_type == "gpt2", **fields}
    if wrapped:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **targets))
        for name in names[1:]:
            model.add_adapter(name, peft.LoraConfig(task_type="CAUSAL_LM", **targets))
    else:
        peft.inject_adapter_in_model(peft.LoraConfig(**targets), model)
    randomize(model)
    return model.eval()


def build_adapted(name: str, *, lora: dict[str, Any] | None = None, **config: Any) -> Any:
    """A small model in float64 with adapters."""
    return add_adapters(build_model(name, **config), **(lora or {}))


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Fill the adapters."""
    generator = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.copy_(0.3 * torch.randn(param.shape, generator=generator, dtype=torch.float64))


def find_base_name(name: str) -> str:
    """The name of a parameter without what peft puts into it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
