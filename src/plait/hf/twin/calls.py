"""What a call of a parallel Hugging Face model means: where tokens are cut, which logits it gives, what it refuses."""

from collections.abc import Mapping
from inspect import Signature, signature
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.agree import share_over
from plait.comm.mesh import Mesh
from plait.errors import ConfigError
from plait.hf.context.calls import OwnTokens
from plait.hf.plan import ModelPlan
from plait.hf.twin.batch import WholeBatch
from plait.parallel.region.arguments import Arguments, map_hidden_states

_WHOLE_OUTPUTS = ("output_hidden_states", "output_attentions")
"""Arguments that ask for tensors which no rank has."""


class Calls:
    """Hooks on a model, its base, and its first layer."""

    def __init__(self, batch: WholeBatch) -> None:
        self.batch = batch
        self.rates: list[tuple[str, nn.Module, str]] = []

    def install(self, model: nn.Module, plan: ModelPlan, own: OwnTokens | None = None) -> None:
        """Hook this into a model, and `own` where that says where its tokens are."""
        base, mesh = model.get_submodule(plan.base), self.batch.mesh
        if mesh.tp.degree > 1 or own is not None:
            self.rates = list(_list_rates(model))
            for called in (model, base):
                called.register_forward_pre_hook(self.check, with_kwargs=True)
            model.generate = Generation(model, mesh)  # type: ignore[assignment]
        if own is not None:
            own.install(model, base)
        model.register_forward_pre_hook(self.begin, with_kwargs=True)
        model.register_forward_hook(self.end, always_call=True)
        model.get_submodule(f"{plan.layers}.0").register_forward_pre_hook(self.enter, with_kwargs=True)
        if plan.exit is not None:
            model.get_submodule(plan.exit).register_forward_hook(self.leave_early)
        base.register_forward_hook(self.leave)
        model.prepare_inputs_for_generation = Preparation(model)  # type: ignore[assignment]
        model.save_pretrained = _Refusal(type(model).__name__)  # type: ignore[assignment]

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Take what is meant for this package."""
        kwargs = dict(kwargs)
        self.batch.gathers_logits = bool(kwargs.pop("gather_logits", False))
        self.batch.is_in_model = True
        keep = kwargs.get("logits_to_keep", 0)
        self.batch.keeps_all = isinstance(keep, int) and keep == 0
        return args, kwargs

    def check(self, model: nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what would be wrong, in front of the model and of its base, which may be called alone."""
        _check_outputs(model, kwargs)
        if model.training:
            self._check_dropouts()

    def end(self, *_: Any) -> None:
        """Forget what was asked for."""
        self.batch.gathers_logits, self.batch.is_in_model, self.batch.keeps_all = False, False, True

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """In front of the first layer."""
        return map_hidden_states(self.batch.enter, args, kwargs)

    def leave_early(self, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        """Behind the last module of a base model that reads the shape of what that gives."""
        return self.batch.leave(self.batch.remember(output))

    def leave(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Behind the base model, whose hidden states are gathered for whoever picks some of them."""
        is_kept = self.batch.is_in_model and self.batch.keeps_all

        def change(x: Tensor) -> Tensor:
            x = self.batch.remember(x)
            return x if is_kept else self.batch.leave(x)

        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        output["last_hidden_state"] = change(output["last_hidden_state"])
        return output

    def _check_dropouts(self) -> None:
        """Rates that a source hands to torch itself: each rank would drop something else, or all the same of its own.

        Raises:
            ConfigError: one is not zero.
        """
        active = [
            f"{name}.{rate} = {getattr(module, rate)}" for name, module, rate in self.rates if _is_rate(module, rate)
        ]
        if active:
            raise ConfigError(
                f"dropout while training, whose mask would depend on the ranks: {active[0]}"
                + (f" and {len(active) - 1} more" if len(active) > 1 else ""),
                hint="set these to 0 in the config (attention_dropout, attn_pdrop, ...), or use model.eval()",
            )


class Generation:
    """`generate` of a parallel model: all ranks draw with the random numbers of the first, so they draw the same."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        # In a tuple, as a model is no child of what it holds.
        self._model = (model,)
        self._mesh = mesh

    @property
    def __signature__(self) -> Any:
        return _leave_out_self(signature(type(self._model[0]).generate))  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What transformers generates."""
        device = self._mesh.device
        torch.set_rng_state(share_over(torch.get_rng_state(), self._mesh.tp, device)[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(share_over(torch.cuda.get_rng_state(device), self._mesh.tp, device)[0], device)
        model: Any = self._model[0]
        return type(model).generate(model, *args, **kwargs)


class Preparation:
    """`prepare_inputs_for_generation` of a parallel model: generation reads all columns of the logits."""

    def __init__(self, model: nn.Module) -> None:
        # In a tuple, as a model is no child of what it holds.
        self._model = (model,)

    @property
    def __signature__(self) -> Any:
        return _leave_out_self(signature(type(self._model[0]).prepare_inputs_for_generation))  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What transformers prepares, and the wish for all columns."""
        model: Any = self._model[0]
        return {**type(model).prepare_inputs_for_generation(model, *args, **kwargs), "gather_logits": True}


class _Refusal:
    """`save_pretrained` of a parallel model, which would write a part for the whole."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, *_: Any, **__: Any) -> None:
        raise ConfigError(
            f"{self.kind}.save_pretrained: this rank has a part of the weights only",
            hint="call plait.save_pretrained(model, path, mesh) on every rank",
        )


def _leave_out_self(found: Signature) -> Signature:
    return found.replace(parameters=[each for each in found.parameters.values() if each.name != "self"])


def _check_outputs(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    config: Any = model.config
    for name in _WHOLE_OUTPUTS:
        asked = kwargs.get(name)
        if asked if asked is not None else getattr(config, name, False):
            raise ConfigError(
                f"{type(model).__name__}: {name} asks for tensors of which each rank has a part",
                hint="register forward hooks on the modules in question, or use the unsharded model",
            )


def _list_rates(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Numbers by which a source itself drops: `self.attention_dropout`; and dropouts whose rate alone it reads."""
    found = []
    for name, module in model.named_modules():
        found += [
            (name, module, rate)
            for rate in vars(module)
            if _is_rate_name(rate) and isinstance(vars(module)[rate], int | float)
        ]
        if name.rpartition(".")[2] in ("attn_dropout", "attention_dropout"):
            found.append((name, module, "p"))
    return found


def _is_rate_name(name: str) -> bool:
    return "drop" in name and not name.startswith("_")


def _is_rate(module: nn.Module, name: str) -> bool:
    value = getattr(module, name, 0)
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
