"""Linears with adapters, as peft builds them: what each module of one becomes, and what has no parallel form.

    lora(x) = base_layer(x) + scaling * lora_B(lora_A(dropout(x)))

The adapter ends in the state of what the base layer gives, so nothing is gathered that was not before:

| base   | lora_A                                      | lora_B                               |
|--------|---------------------------------------------|--------------------------------------|
| column | whole, on the gathered input of the region  | cut as the base's output features    |
| row    | cut as the base's input features, reduced   | whole, on own tokens                 |
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from plait.contract.plan import Column, InnerColumn, InRegion, Plan, Role, Row, TokenLocal, Whole

BASE = "base_layer"
"""Under which name peft keeps the linear that it puts adapters around."""


def unwrap(model: Any) -> Any:
    """The model of transformers in a model of peft; any other is itself."""
    is_wrapper = _is_of_peft(model) and hasattr(model, "get_base_model")
    return model.get_base_model() if is_wrapper else model


def is_adapted(module: nn.Module) -> bool:
    """Whether this is a layer that peft has put around another, of whatever kind."""
    return _is_of_peft(module)


def find_base(module: nn.Module) -> nn.Module:
    """The layer that has adapters; a module without is itself."""
    return getattr(module, BASE, module) if _is_of_peft(module) else module


def list_adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Path and module of every layer with adapters."""
    return ((name, module) for name, module in model.named_modules() if name and is_adapted(module))


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter, by its name."""
    return any(part in ("lora_A", "lora_B") for part in name.split("."))


def find_plain_name(name: str) -> str:
    """The name without adapters of a parameter or module: `q_proj.base_layer.weight` -> `q_proj.weight`."""
    return ".".join(part for part in name.split(".") if part != BASE)


def list_problems(name: str, layer: Any) -> Iterator[str]:
    """Why a layer that peft has put around another cannot be made parallel."""
    kinds = [f"{kind.__module__}.{kind.__name__}" for kind in type(layer).__mro__]
    if kinds[0] != "peft.tuners.lora.layer.Linear":
        what = kinds[0].removeprefix("peft.")
        yield f"{name} ({what}) has no parallel form: of peft that has LoRA of linears in the layers alone"
        return
    variants = sorted({type(variant).__name__ for variant in layer.lora_variant.values()})
    if variants:
        yield f"{name} has a variant of LoRA that has no parallel form: {', '.join(variants)}"
    if layer.merged:
        yield f"{name} has adapters that are merged into its weight: unmerge them first"


def list_config_problems(model: Any) -> Iterator[str]:
    """What the configs of the adapters ask for beside adapters."""
    for name, config in getattr(model, "peft_config", {}).items():
        bias = getattr(config, "bias", "none")
        if bias != "none":
            yield f"adapter {name!r} has bias = {bias!r}, which trains biases of the base: only 'none' can be parallel"
        if getattr(config, "modules_to_save", None):
            yield f"adapter {name!r} has modules_to_save = {list(config.modules_to_save)}, which has no parallel form"


def derive_roles(name: str, layer: Any, base: Mapping[str, Role]) -> dict[str, Role]:
    """The roles in layer `name`, from those that its linear (or each part of a packed one) would have without."""
    roles = {f"{name}.{BASE}{path.removeprefix(name)}": role for path, role in base.items()}
    for adapter, dropout in layer.lora_dropout.items():
        down, up = f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}"
        for path, role in base.items():
            match role:
                case Row(cut):
                    roles |= {down: Row(cut), up: TokenLocal()}
                case Column(cut):
                    roles |= {down: InRegion(), f"{up}{path.removeprefix(name)}": InnerColumn(cut)}
        if isinstance(dropout, nn.Dropout):
            # Of a row's it sees own features, which `prepare` tells it.
            roles[f"{name}.lora_dropout.{adapter}"] = Whole()
    return roles


def list_packed(name: str, layer: Any) -> list[str]:
    """Of a packed linear with adapters, the modules that have its parts: itself, and what gives its output features."""
    return [f"{name}.{BASE}", *(f"{name}.lora_B.{adapter}" for adapter in layer.lora_B)]


def find_row(name: str, plan: Plan) -> Row | None:
    """The role of the linear in layer `name`, where that is a row."""
    role = plan.role_of(f"{name}.{BASE}")
    return role if isinstance(role, Row) else None


def _is_of_peft(module: Any) -> bool:
    return any(kind.__module__.startswith("peft.") for kind in type(module).__mro__)
