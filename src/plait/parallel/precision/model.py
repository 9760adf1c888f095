"""Which linears of a model are quantized, and what they share: histories and random numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import cast

from pydantic import ValidationError
from torch import nn

from plait.comm import collectives
from plait.comm.mesh import Axis, Mesh
from plait.config.quantization import QuantizationConfig
from plait.config.recipe import Recipe, RecipeName
from plait.config.section import Problem, list_problems
from plait.contract.plan import Plan, Role, Row
from plait.contract.quantization import count_blocks, find_selected, list_histories, list_torn_blocks, select_linears
from plait.errors import ConfigError
from plait.overlap.site import Precision
from plait.parallel.precision.quantizer import RecipeQuantizer
from plait.parallel.precision.region import LoneRegion
from plait.parallel.precision.scheme import LinearScheme
from plait.parallel.region.quantizer import PLAIN, Quantizer
from plait.quant.history import AmaxHistories
from plait.quant.linear import QuantizedLinear, find_kernels
from plait.quant.matmul import find_accumulator
from plait.quant.select import Gemm, Kernel, KernelChoice, check_strict
from plait.sharding import Interval, Ownership, Placement, Shard

ATTRIBUTE = "plait_precision"
"""Of a model some of whose linears are quantized: its `ModelPrecision`."""

Quantization = QuantizationConfig | RecipeName


def read_quantization(quantization: Quantization) -> QuantizationConfig:
    """What was asked for, by the name of a recipe or in full.

    Raises:
        ConfigError: there is no such recipe, or no such key.
    """
    try:
        return QuantizationConfig.model_validate(quantization)
    except ValidationError as error:
        problems = [_say(problem) for problem in list_problems(error)]
        raise ConfigError.from_problems("quantization", problems) from None


def _say(problem: Problem) -> str:
    if not problem.key:
        return "should be the name of a recipe, a table or a QuantizationConfig"
    hint = "" if problem.hint is None else f" ({problem.hint})"
    return f"{problem.key} {problem.text}{hint}"


@dataclass(frozen=True)
class ModelPrecision:
    """What is quantized of a model.

    Attributes:
        recipes: by module.
        linears: the same modules, as this rank has them.
        histories: of delayed scaling; None where nothing looks back.
        kernels: what multiplies, by GEMM, and why.
        accumulator: the dtype in which an emulation sums.
    """

    mesh: Mesh
    recipes: Mapping[str, Recipe]
    linears: Mapping[str, LinearScheme]
    histories: AmaxHistories | None
    kernels: Mapping[Gemm, KernelChoice]
    accumulator: str

    @property
    def recipe(self) -> Recipe:
        """The one of all of them."""
        return next(iter(self.recipes.values()))

    def build_entry_quantizer(
        self, names: Sequence[str], label: str, outside: Placement, shared_over: Sequence[Axis | None]
    ) -> Quantizer:
        """That of columns with one input, which arrives as `outside`; one that leaves all as it is where none is meant.

        Raises:
            ConfigError: some of them are quantized, and some are not.
        """
        linears = [self.linears[name] for name in names if name in self.linears]
        if not linears:
            return PLAIN
        if len(linears) < len(names):
            high = next(name for name in names if name not in self.linears)
            raise ConfigError(
                f"{label}: {linears[0].name} is quantized and {high} is not, but they read one input, gathered once",
                hint="let the groups of the plan have linears of one kind",
            )
        history = linears[0].history
        if history is not None:
            history = history.share_input(names)
        is_cut = isinstance(outside, Shard)
        return RecipeQuantizer(self.mesh, label, linears, history, shared_over, is_cut, True, False)

    def build_exit_quantizer(self, name: str, outside: Placement) -> Quantizer:
        """That of a row linear, whose output leaves as `outside`."""
        linear = self.linears.get(name)
        if linear is None:
            return PLAIN
        is_cut = isinstance(outside, Shard)
        return RecipeQuantizer(self.mesh, name, [linear], linear.history, [None], True, is_cut, is_cut)

    def describe(self) -> Precision:
        """As it is said in a receipt."""
        kinds: dict[KernelChoice, list[str]] = {}
        for gemm, choice in self.kernels.items():
            kinds.setdefault(choice, []).append(gemm)
        said = [
            (self._name_kernel(choice.kernel) + (f" ({', '.join(gemms)})" if len(kinds) > 1 else ""), choice.reason)
            for choice, gemms in kinds.items()
        ]
        kernels, reasons = zip(*said, strict=True)
        return Precision(self.recipe, "; ".join(kernels), "; ".join(dict.fromkeys(reasons)))

    def _name_kernel(self, kernel: Kernel) -> str:
        return "native" if kernel == "native" else f"emulated, {self.accumulator} accumulator"


def build_precision(
    quantization: QuantizationConfig,
    model: nn.Module,
    mesh: Mesh,
    roles: Mapping[str, Role],
    ownership: Mapping[str, Ownership],
    is_kept: Callable[[str], bool],
    num_blocks: int | None,
) -> ModelPrecision | None:
    """What of a model is quantized; None where nothing is.

    `roles` and `ownership` are of modules and of their weights, by one name each; `is_kept` says what else stays.
    `num_blocks` is given where `model` is a part of one that has so many, and the part may have nothing to quantize.

    Raises:
        ConfigError: nothing would be quantized; blocks that are torn; a group only part of which is quantized; with
            `strict`, a device that emulates.
    """
    wanted = {name: role for name, role in roles.items() if not is_kept(name)}
    if num_blocks is None:
        recipes = select_linears(quantization, wanted, count_blocks(name for name, _ in model.named_modules()))
    else:
        recipes = find_selected(quantization, wanted, num_blocks)
    if quantization.resolved is not None:
        mesh.token_unit = lcm(mesh.token_unit, quantization.resolved.token_unit)
    if not recipes:
        return None
    recipe = next(iter(recipes.values()))
    problems = [problem for name in recipes for problem in list_torn_blocks(recipe, ownership[name])]
    if problems:
        raise ConfigError.from_problems(
            f"quantization.recipe = {quantization.recipe}",
            problems,
            hint="take a recipe without blocks, a degree that leaves whole blocks, or quantization.layers = mlp_only",
        )
    weight = model.get_submodule(next(iter(recipes))).get_parameter("weight")
    kernels = find_kernels(recipe, mesh.device, weight.dtype)
    if quantization.strict:
        check_strict(f"{next(iter(recipes))} and {len(recipes) - 1} more", kernels)
    names = list_histories(recipes)
    histories = AmaxHistories(names, recipe.amax_history, mesh.device) if names else None
    linears = {
        name: _build_linear(name, recipe, ownership[name], isinstance(roles[name], Row), mesh, histories)
        for name in recipes
    }
    accumulator = str(find_accumulator(weight.dtype)).removeprefix("torch.")
    return ModelPrecision(mesh, recipes, linears, histories, kernels, accumulator)


def build_twins(precision: ModelPrecision, model: nn.Module) -> dict[nn.Module, nn.Module]:
    """On one rank, the quantized linear that takes the place of each that is selected."""
    twins: dict[nn.Module, nn.Module] = {}
    for name, linear in precision.linears.items():
        module = model.get_submodule(name)
        bias = cast("nn.Parameter | None", module.bias)
        twin = QuantizedLinear(module.get_parameter("weight"), bias, recipe=linear.recipe, name=name)
        linear.attach(twin)
        twins[module] = twin
    return twins


def enter_regions(
    precision: ModelPrecision, model: nn.Module, groups: Mapping[tuple[str, str], Sequence[str]], plan: Plan
) -> None:
    """On one rank, let what is in the regions that `plan` names see their input as the quantized columns read it."""
    for (parent, _), names in groups.items():
        linears = [precision.linears[name] for name in names if name in precision.linears]
        if linears and plan.find_region(parent) == parent:
            LoneRegion(model.get_submodule(parent), linears)


def find_precisions(model: nn.Module) -> list[ModelPrecision]:
    """What is quantized of a model, or of those that it holds."""
    found = (vars(module).get(ATTRIBUTE) for module in model.modules())
    return list({id(each): each for each in found if each is not None}.values())


def update_amax_history(model: nn.Module) -> None:
    """Let delayed scales of `model` go by the step that ends: call it after every step of the optimizer.

    One all_reduce over tp and one over dp and cp, of float32 `[N]`, the largest magnitudes of N tensors; nothing where
    no scale looks back. Every rank has to call it.
    """
    HistoryUpdate(model).run()


class HistoryUpdate:
    """What `update_amax_history` does for one model, whose histories it finds once."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (each.histories, (each.mesh.tp, each.mesh.dp_cp))
            for each in find_precisions(model)
            if each.histories is not None
        ]

    def run(self) -> None:
        """After every step of the optimizer, on every rank."""
        for histories, axes in self._kept:
            amaxes = histories.noted.clone()
            for axis in axes:
                amaxes = collectives.all_reduce(amaxes, axis, op="max", label="amax_history")
            histories.update(amaxes)


def _build_linear(
    name: str, recipe: Recipe, weight: Ownership, is_row: bool, mesh: Mesh, histories: AmaxHistories | None
) -> LinearScheme:
    width = weight.shape[0]
    features = Interval(0, width) if is_row else weight.intervals(mesh.tp.rank)[0]
    history = None if histories is None else histories.of(name)
    return LinearScheme(name, recipe, mesh.device, features, width, history)
