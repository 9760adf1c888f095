"""Checkpoints of adapters: written as peft keeps them, or added to the weights that they were trained for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.shards import METADATA
from plait.checkpoint.spec import TensorSpec, sort_names
from plait.checkpoint.stream import TensorWriter
from plait.checkpoint.weights import derive_fingerprint
from plait.errors import CheckpointError, ConfigError
from plait.hf.adapters import build_peft_config
from plait.hf.convert.origin import Origin, open_as_model
from plait.hf.convert.write import assemble, derive_spec
from plait.hf.directory.source import Intervals, Source
from plait.hf.lora.files import NAME, WEIGHTS, write_adapter_config
from plait.hf.save import group_parts
from plait.sharding import Interval


def write_adapter(
    origin: Origin, folder: Path, dtype: torch.dtype | None, advance: Callable[[int], None]
) -> dict[str, TensorSpec]:
    """Write the directory that `PeftModel.from_pretrained` reads; return what is in it.

    Raises:
        CheckpointError: a file cannot be read or written.
    """
    assert origin.anatomy is not None, origin.path
    assert origin.lora is not None, origin.path
    parts = group_parts(origin.stored)
    specs = {
        name: derive_spec(origin.source, held[0][0], dtype)._replace(shape=held[0][1].shape)
        for name, held in parts.items()
    }
    with TensorWriter(folder / WEIGHTS, specs, METADATA) as writer:
        for name in sort_names(specs):
            writer.write(name, assemble(origin.source, specs[name], parts[name]))
            advance(specs[name].size_bytes)
    config = build_peft_config(origin.anatomy.model, origin.lora)
    # The model has been taken apart: whether it has transposed linears (GPT-2's) is known by where they are stored.
    config.fan_in_fan_out = any(stored.is_transposed for stored in origin.anatomy.stored.values())
    if origin.lora.target_modules is None:
        config.target_modules = {fqn.split(".lora_")[0].rpartition(".")[2] for fqn in origin.stored}
    write_adapter_config(config, folder, _find_base(origin))
    return specs


def merge(origin: Origin) -> Origin:
    """The directory that the adapters were trained for, with these added to its weights.

    Raises:
        ConfigError: it is no longer there.
        CheckpointError: its weights are others now.
    """
    assert origin.lora is not None, origin.path
    folder = _find_base(origin)
    if not folder.is_dir():
        raise ConfigError(
            f"{origin.path}: was trained for {folder}, which is no longer there", hint="put it back there"
        )
    trained_for = origin.state.get("identity", {}).get("model.weights")
    if trained_for is not None and trained_for != derive_fingerprint(folder):
        raise CheckpointError(f"{origin.path}: was trained for {folder}, whose weights are others now")
    base = open_as_model(folder)
    scale = origin.lora.alpha / origin.lora.rank
    return replace(base, source=_Merged(base.source, origin.source, frozenset(origin.stored), scale))


def _find_base(origin: Origin) -> Path:
    """The directory that the adapters were trained for."""
    return Path(origin.state["config"]["model"]["path"])


@dataclass(frozen=True)
class _Merged:
    """Weights and, where there is an adapter, its product, added in float32."""

    base: Source
    adapters: Source
    names: frozenset[str]
    scale: float

    def spec(self, fqn: str) -> TensorSpec:
        """That of the base."""
        return self.base.spec(fqn)

    def copy_into(self, target: Tensor, fqn: str, intervals: Intervals) -> None:
        """Fill `target` with an interval for every dim, in its own dtype."""
        up, down = self._find(fqn)
        if up not in self.names:
            self.base.copy_into(target, fqn, intervals)
            return
        weight = torch.empty(target.shape)
        self.base.copy_into(weight, fqn, intervals)
        rows, columns = intervals
        rank = Interval(0, self.adapters.spec(down).shape[0])
        target.copy_(weight + self._read(up, (rows, rank)) @ self._read(down, (rank, columns)) * self.scale)

    def _find(self, fqn: str) -> tuple[str, str]:
        """The names that `B` and `A` of a weight have, if it has an adapter; each part of a packed one has its `B`."""
        linear = fqn.removesuffix(".weight")
        above, _, part = linear.rpartition(".")
        packed = f"{above}.lora_B.{NAME}.{part}.weight"
        if packed in self.names:
            return packed, f"{above}.lora_A.{NAME}.weight"
        return f"{linear}.lora_B.{NAME}.weight", f"{linear}.lora_A.{NAME}.weight"

    def _read(self, fqn: str, intervals: Intervals) -> Tensor:
        piece = torch.empty([len(interval) for interval in intervals])
        self.adapters.copy_into(piece, fqn, intervals)
        return piece
