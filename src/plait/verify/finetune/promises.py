"""What each rank is to issue in the step that is verified, over every axis but tp."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.config.run import FineTuneConfig
from plait.contract.axis.directory import Directory, Layer, Owned, derive_attention_plan
from plait.contract.context.attention import AttentionSize
from plait.contract.context.mask import AttentionMask
from plait.hf.context.core import find_window
from plait.hf.directory.skeleton import build_skeleton
from plait.hf.heads import HeadCount
from plait.hf.plan import ModelPlan, plan_for
from plait.schedule.context import RingProgram, build_ring_backward, build_ring_forward
from plait.verify.runtime.promises import list_masks
from plait.verify.runtime.recipe import FIRST
from plait.verify.static.trace import Moved, list_promised_messages


class Promises:
    """A directory, read without its weights."""

    def __init__(self, config: FineTuneConfig) -> None:
        self.config = config
        self.model: Any = build_skeleton(Path(config.model.path))
        self.plan: ModelPlan = plan_for(self.model)

    def describe(self, owned: Mapping[str, Owned], rank: int) -> Directory:
        """What global rank `rank` has, which owns `owned`."""
        tp_rank = self.config.parallel.mesh_shape.coordinates(rank).tp
        layers = [self._describe_layer(name, heads, owned, tp_rank) for name, heads in self.plan.heads.items()]
        inside = f"{self.plan.layers}."
        ends = tuple(each for name, each in owned.items() if not name.startswith(inside))
        return Directory(tuple(layers), ends, tp_rank)

    def list_masks(self, rank: int) -> list[AttentionMask]:
        """What sees what in each micro-batch of global rank `rank`, whatever the window of a layer."""
        return list_masks(self.config, rank, FIRST)

    def list_ring_messages(self, model: Directory, rank: int) -> list[Moved]:
        """The messages of ring attention that global rank `rank` sends and waits for, in order."""
        run, cp_rank = self.config, self.config.parallel.mesh_shape.coordinates(rank).cp
        programs: list[RingProgram] = []
        for mask in self.list_masks(rank):
            plans = [derive_attention_plan(run, layer, mask) for layer in model.layers]
            forward = [build_ring_forward(plan.needs, plan.order.split, cp_rank) for plan in plans]
            programs += forward
            for plan, again in zip(reversed(plans), reversed(forward), strict=True):
                programs += [again] if run.train.recompute == "full" else []
                programs.append(build_ring_backward(plan.needs, plan.order.split, cp_rank))
        return list_promised_messages(programs)

    def _describe_layer(self, name: str, heads: HeadCount, owned: Mapping[str, Owned], tp_rank: int) -> Layer:
        attention, run = self.model.get_submodule(name), self.config
        own = heads.per_rank(run.parallel.tp, tp_rank)
        size = AttentionSize(
            batch=run.train.micro_batch_size,
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads,
            head_width=getattr(attention, "head_dim", None) or attention.head_size,
            dtype=run.precision.compute,
            sum_dtype=run.precision.reduce_dtype,
        )
        layer = f"{self.plan.layers}.{name.removeprefix(f'{self.plan.layers}.').partition('.')[0]}."
        inside = tuple(each for path, each in owned.items() if path.startswith(layer))
        return Layer(find_window(attention, self.model.config), size, inside)
