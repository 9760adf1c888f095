"""Mistakes with quantized tensors, to be made on purpose inside the ranks, each of which a verification has to find."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from plait.config.recipe import Operand
from plait.parallel.precision import quantizer
from plait.parallel.precision.scheme import GradientNoise, LinearScheme
from plait.quant import cast, scheme
from plait.quant.history import AmaxHistories
from plait.schedule import program
from plait.sharding import Interval
from tests.support.mutations import MutatedRanks


@dataclass(frozen=True)
class QuantizationFault:
    """One of `FAULTS`, by name, so that it can be sent to a rank."""

    name: str

    def make(self) -> AbstractContextManager[Any]:
        """Make the mistake while the context lasts."""
        return FAULTS[self.name]()


def break_ranks(ranks: Any, name: str) -> MutatedRanks:
    """Ranks on which every call makes the mistake `name`."""
    return MutatedRanks(ranks, QuantizationFault(name))  # type: ignore[arg-type]


def go_by_own_amax() -> AbstractContextManager[Any]:
    """What each rank measures is issued and promised, and not used."""
    agree = quantizer.RecipeQuantizer._agree

    def forget(self: Any, measured: Any, is_cut: Any) -> list[Tensor]:
        agree(self, measured, is_cut)
        return list(measured)

    return patch.object(quantizer.RecipeQuantizer, "_agree", forget)


def drop_scales_of_blocks() -> AbstractContextManager[Any]:
    def decode_none(codes: Tensor, operand: Operand) -> Tensor:
        return torch.ones(codes.shape)

    return patch.object(cast, "decode_block_scales", decode_none)


def round_columns_from_rows() -> AbstractContextManager[Any]:
    quantize = scheme.quantize

    def quantize_twice(x: Tensor, operand: Operand, orientations: Any, scales: Any, **options: Any) -> Any:
        if orientations == ("columns",) and operand.block is not None:
            rows = quantize(x, operand, ("rows",), scales)
            x = rows.dequantize("rows", torch.float64)
        return quantize(x, operand, orientations, scales, **options)

    return patch.object(scheme, "quantize", quantize_twice)


def cut_tokens_inside_blocks() -> AbstractContextManager[Any]:
    build = program.build_pieces
    return patch.object(program, "build_pieces", lambda split, chunks, unit=1: build(split, chunks, 1))


def draw_noise_by_local_row() -> AbstractContextManager[Any]:
    build = LinearScheme.build
    return patch.object(LinearScheme, "build", lambda self, first_row=0: build(self, 0))


def draw_noise_by_local_feature() -> AbstractContextManager[Any]:
    draw = GradientNoise.draw

    def draw_local(self: GradientNoise, orientation: Any, shape: Any, device: Any) -> Tensor:
        local = replace(self, features=Interval(0, len(self.features)), width=len(self.features))
        return draw(local, orientation, shape, device)

    return patch.object(GradientNoise, "draw", draw_local)


def look_back_at_own_steps() -> AbstractContextManager[Any]:
    """What all ranks noted is issued and promised, and not used."""
    update = AmaxHistories.update
    return patch.object(AmaxHistories, "update", lambda self, amaxes: update(self, self.noted.clone()))


def scale_by_the_current_step() -> AbstractContextManager[Any]:
    return patch.object(AmaxHistories, "update", lambda self, amaxes: None)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "own largest magnitude": go_by_own_amax,
    "scales of blocks dropped": drop_scales_of_blocks,
    "columns rounded from rows": round_columns_from_rows,
    "a chunk cut inside a block": cut_tokens_inside_blocks,
    "rounding noise by local token": draw_noise_by_local_row,
    "rounding noise by local feature": draw_noise_by_local_feature,
    "own history": look_back_at_own_steps,
    "histories never updated": scale_by_the_current_step,
}
