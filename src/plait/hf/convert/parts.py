"""Under which names checkpoints of ours hold the parameters of a Hugging Face model, the same at every degree.

On several ranks a packed linear is several, and one that was transposed is not. On one rank linears stay as they are in
transformers; their parts are then views.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from plait.errors import ConfigError
from plait.hf.adapters import copy_adapters
from plait.hf.directory.skeleton import build_from_config, list_saved_buffers
from plait.hf.parallelize import take_apart_model
from plait.hf.plan import ModelPlan, plan_for
from plait.hf.stored import Stored
from plait.parallel import match
from plait.parallel.apply import mesh_of
from plait.sharding import Ownership


@dataclass(frozen=True)
class Anatomy:
    """A Hugging Face model on the meta device, its packed linears taken apart."""

    model: nn.Module
    plan: ModelPlan
    stored: Mapping[str, Stored]
    """Where each parameter and saved buffer is in a Hugging Face directory, in the model's order."""

    @classmethod
    def of(cls, skeleton: nn.Module) -> "Anatomy":
        """Take a model on the meta device apart, in place.

        Raises:
            ConfigError: there is no plan for it.
        """
        plan = plan_for(skeleton)
        special = take_apart_model(skeleton, plan)
        named = [*skeleton.named_parameters(), *list_saved_buffers(skeleton)]
        stored = {fqn: special.get(fqn, Stored(fqn, tuple(tensor.shape))) for fqn, tensor in named}
        return cls(skeleton, plan, stored)

    def derive_ownership(self, tp: int) -> dict[str, Ownership]:
        """Who owns what at a degree.

        Raises:
            ConfigError: it cannot be realised.
        """
        plan = self.plan.build_plan(sequence_parallel=True)
        cut = match.derive_ownership(self.model, match.match_roles(self.model, plan), tp, plan)
        whole = {fqn: Ownership(fqn, tuple(buffer.shape)) for fqn, buffer in list_saved_buffers(self.model)}
        return {**cut, **whole}


def list_parts(model: nn.Module) -> dict[str, list[tuple[str, Stored]]]:
    """By FQN in a parallel model, the parts that checkpoints of ours hold instead; only those that differ.

    Raises:
        ConfigError: the model is not parallel.
    """
    mesh = mesh_of(model)
    if mesh is None:
        raise ConfigError(f"{type(model).__name__} is not parallel", hint="give what plait.parallelize returned")
    if mesh.tp.degree > 1:
        return {}
    skeleton = build_from_config(copy.deepcopy(model.config))
    copy_adapters(model, skeleton)
    anatomy = Anatomy.of(skeleton)
    parts: dict[str, list[tuple[str, Stored]]] = {}
    for fqn, stored in anatomy.stored.items():
        if stored.dim is not None or stored.is_transposed:
            parts.setdefault(stored.name, []).append((fqn, stored))
    return parts
