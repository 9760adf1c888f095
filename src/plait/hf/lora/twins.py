"""Around the swap of modules for their parallel twins: what adapters need before it, and a model of peft behind it."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from plait.comm.mesh import Mesh
from plait.contract.plan import Plan
from plait.errors import ConfigError
from plait.hf.lora.layers import find_plain_name, find_row, list_adapted
from plait.hf.stored import ATTRIBUTE, Stored, stored_of
from plait.parallel import apply
from plait.parallel.dropout import FeatureDropout


def prepare(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Let the dropout in front of a row's adapter draw for the features of this rank."""
    for name, layer in list_adapted(model):
        row = find_row(name, plan)
        if row is None:
            continue
        features = row.cut.build_split(layer.in_features, mesh.tp.degree)
        for adapter, dropout in layer.lora_dropout.items():
            if isinstance(dropout, nn.Dropout):
                own = FeatureDropout(dropout.p, features, mesh.tp.rank)
                layer.lora_dropout[adapter] = own.train(dropout.training)


def locate(model: nn.Module, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Where all is that has another name in a checkpoint: there, linears with adapters are plain linears."""
    places = {
        name: stored.get(name, Stored(name, tuple(param.shape)))
        for name, param in model.named_parameters(remove_duplicate=False)
        if name in stored or find_plain_name(name) != name
    }
    return {name: _rename(place) for name, place in places.items()}


def finish(model: nn.Module) -> None:
    """Refuse what would go by whole weights."""
    for _, layer in list_adapted(model):
        layer.merge = _Refusal("merge", "plait convert CHECKPOINT DIR --merge writes the merged model")


def adopt(outer: nn.Module, inner: nn.Module) -> None:
    """Let a model of peft be parallel as the model of transformers in it is."""
    path = apply.adopt(outer, inner)
    setattr(outer, ATTRIBUTE, {f"{path}.{name}": place for name, place in stored_of(inner).items()})
    outer.save_pretrained = _Refusal(  # type: ignore[assignment]
        f"{type(outer).__name__}.save_pretrained",
        "call plait.hf.lora.files.save_adapter(model, path, mesh) on every rank",
    )


class _Refusal:
    """A method of peft that would take this rank's part for the whole."""

    def __init__(self, what: str, hint: str) -> None:
        self.what, self.hint = what, hint

    def __call__(self, *_: Any, **__: Any) -> None:
        raise ConfigError(f"{self.what}: this rank has a part of the weights only", hint=self.hint)


def _rename(place: Stored) -> Stored:
    return Stored(find_plain_name(place.name), place.shape, place.dim, place.interval, place.is_transposed)
