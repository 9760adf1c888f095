"""What a precision recipe makes of a contract: which linears it holds for, what travels, what has to be agreed on.

A tensor that is gathered is quantized before: bytes travel, those of its numbers and behind them those of the scales of
its blocks, row by row. What is gathered for a GEMM lies in blocks along what that GEMM contracts: a row linear's
gradient, which dgrad and wgrad both read, travels both ways where it has blocks at all.

The scale of a whole tensor is that of the tensor of all ranks: the largest magnitude over tp is agreed on before, or,
where scaling is delayed, once a step.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Literal

from plait.config.recipe import Operand, Recipe
from plait.contract.plan import Column, FeatureNorm, InnerColumn, Plan, Role, Row, VocabHead
from plait.errors import ConfigError
from plait.sharding import Columns, Ownership

if TYPE_CHECKING:  # a linear is explained without pydantic, whose import takes longer
    from plait.config.quantization import QuantizationConfig

What = Literal["input", "weight", "gradient"]
"""A tensor of a linear, as a recipe names it."""

Orientation = Literal["rows", "columns"]
"""Blocks lie along the features of a row, for forward and dgrad, or along the tokens of a column, for wgrad."""

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def list_orientations(operand: Operand, gemms: Iterable[str]) -> tuple[Orientation, ...]:
    """How what `gemms` (forward, dgrad, wgrad) read lies in blocks; without blocks rows stand for both."""
    wanted: dict[Orientation, None] = {}
    for gemm in gemms:
        wanted["columns" if gemm == "wgrad" and operand.block is not None else "rows"] = None
    return tuple(sorted(wanted, reverse=True))


def count_row_bytes(operand: Operand, gemms: Iterable[str], width: int) -> int:
    """What a row of `width` numbers weighs on the way to `gemms`."""
    return len(list_orientations(operand, gemms)) * operand.row_bytes(width)


def count_amaxes(recipe: Recipe, what: What) -> int:
    """How many largest magnitudes of a tensor have to be known before it is quantized.

    A second one is that of what wgrad reads where it is mixed along the tokens before.
    """
    if not recipe.operands[what].needs_amax:
        return 0
    return 2 if recipe.hadamard and what != "weight" else 1


def list_histories(recipes: Mapping[str, Recipe]) -> list[str]:
    """By module and tensor (`layers.1.mlp.w_up.input`), of what the largest magnitudes of earlier steps are kept."""
    return [
        f"{module}.{what}"
        for module, recipe in recipes.items()
        for what, operand in recipe.operands.items()
        if operand.scaling == "delayed"
    ]


def select_linears(quantization: "QuantizationConfig", roles: Mapping[str, Role], num_blocks: int) -> dict[str, Recipe]:
    """By module, what holds for each linear that is quantized: in the blocks that are not kept, and the head if asked.

    Raises:
        ConfigError: no linear is left to quantize.
    """
    selected = find_selected(quantization, roles, num_blocks)
    if not selected and quantization.resolved is not None:
        raise ConfigError(
            f"quantization.recipe = {quantization.recipe!r} quantizes nothing: of {num_blocks} blocks the first "
            f"{quantization.keep_first} and the last {quantization.keep_last} are kept as they are",
            hint="lower quantization.keep_first and quantization.keep_last",
        )
    return selected


def find_selected(quantization: "QuantizationConfig", roles: Mapping[str, Role], num_blocks: int) -> dict[str, Recipe]:
    """As `select_linears`, of a part of a model of `num_blocks` blocks, in which nothing may be selected."""
    recipe = quantization.resolved
    if recipe is None:
        return {}
    return {name: recipe for name, role in roles.items() if _is_selected(quantization, name, role, num_blocks)}


def is_block_selected(quantization: "QuantizationConfig", index: int, num_blocks: int) -> bool:
    """Whether block `index` is not one of those that are kept."""
    return quantization.keep_first <= index < num_blocks - quantization.keep_last


def align_plan(plan: Plan, recipe: Recipe) -> Plan:
    """The same plan, MLP columns cut in whole blocks of what is contracted."""
    unit = recipe.feature_unit
    if unit == 1:
        return plan
    roles: dict[str, Role | str] = {pattern: _align(role, unit) for pattern, role in plan.resolved.items()}
    return replace(plan, roles=roles)


def list_torn_blocks(recipe: Recipe, weight: Ownership) -> list[str]:
    """What of the weight `[out, in]` of a quantized linear no block format can cut."""
    problems = []
    for dim, what in enumerate(("output", "input")):
        unit = recipe.feature_unit
        if weight.shape[dim] % unit:
            problems.append(f"{weight.name}: {weight.shape[dim]} {what} features are no whole blocks of {unit}")
        elif weight.dim == dim and weight.split is not None and (torn := weight.split.find_torn(unit)) is not None:
            problems.append(f"{weight.name}: a rank would have {what} features {torn}, in blocks of {unit}")
    return problems


def count_blocks(names: Iterable[str]) -> int:
    """How many blocks a model has, by the indices in the names of its modules: `layers.3.mlp`."""
    return 1 + max((index for name in names if (index := find_block(name)) is not None), default=-1)


def find_block(name: str) -> int | None:
    """The index of the block that a module is in; None outside."""
    found = _INDEX.search(name)
    return None if found is None else int(found.group())


def is_wanted(quantization: "QuantizationConfig", name: str, role: Role | None) -> bool:
    """Whether a module is a linear that is quantized where its block is not kept.

    Columns inside an entered region are not: of what they read no largest magnitude is agreed on.
    """
    if isinstance(role, VocabHead):
        return quantization.head
    is_linear = isinstance(role, Column | Row) and find_block(name) is not None
    return is_linear and (quantization.layers == "all" or ".mlp." in name)


def _is_selected(quantization: "QuantizationConfig", name: str, role: Role, num_blocks: int) -> bool:
    index = find_block(name)
    return is_wanted(quantization, name, role) and (index is None or is_block_selected(quantization, index, num_blocks))


def _align(role: Role, unit: int) -> Role:
    match role:
        case Column(Columns(own), group):
            return Column(Columns(lcm(own, unit)), group)
        case InnerColumn(Columns(own)) | FeatureNorm(Columns(own)) | Row(Columns(own)):
            return replace(role, cut=Columns(lcm(own, unit)))
        case _:
            return role
