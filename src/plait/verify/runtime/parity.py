"""Verifies a sharded model against its unsharded twin: every number of one training step, and every collective."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.config.run import AnyRun, RunConfig
from plait.contract.pipeline.step import derive_transfers
from plait.contract.training import build_setting
from plait.overlap.receipt import Receipt, build_empty_receipt
from plait.overlap.stages import merge_receipts
from plait.verify.report import ExactCheck, RecipeError, Report, TensorError, TraceCheck
from plait.verify.runtime import twin
from plait.verify.runtime.compare import Measure, Step, find_distance
from plait.verify.runtime.pieces import Assembly
from plait.verify.runtime.promises import is_of_ring, list_promised_collectives, list_ring_messages
from plait.verify.runtime.recipe import (
    Phase,
    choose_exact_scales,
    choose_precision,
    drop_recipe,
    list_phases,
)
from plait.verify.runtime.sharded import RankResult, run_sharded
from plait.verify.static.budget import ErrorBudget, build_budget
from plait.verify.static.trace import (
    find_difference,
    find_message_difference,
    find_transfer_difference,
    list_promised_messages,
)


class Ranks(Protocol):
    """Launched ranks (`plait.comm.launch.LocalRanks`)."""

    def call(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Run `function` on every rank and return the results in rank order."""


@dataclass(frozen=True)
class Reference:
    """What the unsharded model computes for a config.

    Attributes:
        measures: of each phase, with what its quantities are called.
        reordering_errors: by quantity and name.
        unquantized: the same steps without a recipe, where there is one.
    """

    budget: ErrorBudget
    measures: dict[Phase, Measure]
    reordering_errors: dict[tuple[str, str], float]
    initial: dict[str, Tensor]
    integers: dict[str, Tensor]
    unquantized: dict[Phase, Step]


def build_reference(config: RunConfig) -> Reference:
    """Run the unsharded model, exactly and reordered, and without its recipe if it has one."""
    config = choose_precision(config)
    phases, budget = list_phases(config), _build_budget(config)
    measures = {
        phase: Measure(step, config.train, budget.value)
        for phase, step in zip(phases, twin.run_exact_steps(config, phases), strict=True)
    }
    reordered = dict(zip(phases, twin.run_reordered_steps(config, phases), strict=True))
    plain = twin.run_exact_steps(drop_recipe(config), phases) if config.quantization.resolved is not None else ()
    return Reference(
        budget,
        measures,
        {
            (phase.label(quantity), name): error
            for phase, measure in measures.items()
            for quantity, name, error in measure.errors(reordered[phase])
        },
        twin.run_initialized(config),
        twin.run_integers(choose_exact_scales(config)),
        dict(zip(phases, plain, strict=False)),
    )


def check_parity(config: RunConfig, ranks: Ranks, reference: Reference | None = None) -> Report:
    """Run the sharded model on `ranks` and compare it with its unsharded twin.

    A `reference` of the same model, batch and precision may be shared between degrees and modes.
    """
    asked, config = config, choose_precision(config)
    reference = reference or build_reference(config)
    with TemporaryDirectory(prefix="plait-verify-") as folder:
        results = ranks.call(run_sharded, config=config, folder=folder)
        assembly = Assembly(folder, [result.parts for result in results])
        exact = [
            compare_exactly("initial weights", assembly.whole("initial"), reference.initial),
            compare_exactly(_name_integers(config), assembly.whole("integers"), reference.integers),
        ]
        steps = {phase: assemble_step(assembly, phase) for phase in reference.measures}
        if len(results) > 1:
            exact.append(ExactCheck("replicas", assembly.num_replicated, tuple(assembly.differing)))
    traces = [check for rank, result in enumerate(results) for check in _check_traces(config, rank, result)]
    if config.overlap.policy != "disabled":
        traces += [check_messages(rank, result) for rank, result in enumerate(results)]
    if config.parallel.cp > 1 and config.context.method == "ring":
        traces += [_check_ring(config, rank, result) for rank, result in enumerate(results)]
    return Report(
        describe_run(asked, asked.model.num_parameters),
        reference.budget,
        tuple(_measure_errors(steps, reference)),
        tuple(exact),
        tuple(traces),
        _merge_receipts(config, results),
        tuple(_measure_recipe(steps, reference)),
    )


def _merge_receipts(config: RunConfig, results: Sequence[RankResult]) -> Receipt:
    """That of the first rank of each stage."""
    first, *_ = config.parallel.mesh_shape.list_groups("pp")
    receipts = [receipt for rank in first if (receipt := results[rank].receipt) is not None]
    return merge_receipts(receipts) if receipts else build_empty_receipt(config.overlap.asked)


def assemble_step(assembly: Assembly, phase: Phase) -> Step:
    """What all ranks together computed in a phase."""
    scalars = {name: assembly.whole(phase.label(name))[name] for name in ("logits", "loss", "gradient norm")}
    gradients, updated = assembly.whole(phase.label("gradient")), assembly.whole(phase.label("update"))
    return Step(scalars["logits"], scalars["loss"], gradients, scalars["gradient norm"], updated)


def _measure_errors(steps: Mapping[Phase, Step], reference: Reference) -> Iterator[TensorError]:
    for phase, step in steps.items():
        for quantity, name, error in reference.measures[phase].errors(step):
            label = phase.label(quantity)
            yield TensorError(label, name, error, reference.reordering_errors[label, name])


def _measure_recipe(steps: Mapping[Phase, Step], reference: Reference) -> Iterator[RecipeError]:
    """What quantizing does to the step, which is no mistake."""
    for phase, plain in reference.unquantized.items():
        step = steps[phase]
        for name in ("loss", "logits", "gradient norm"):
            field = name.replace(" ", "_")
            yield RecipeError(phase.label(name), name, find_distance(getattr(step, field), getattr(plain, field)))
        for name, gradient in step.gradients.items():
            yield RecipeError(phase.label("gradient"), name, find_distance(gradient, plain.gradients[name]))


def _name_integers(config: RunConfig) -> str:
    what = "linear regions on integers"
    return what if choose_exact_scales(config) is config else f"{what}, scales 2**n"


def compare_exactly(what: str, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> ExactCheck:
    """Compare tensors by name, bit for bit."""
    differing = [
        f"{name}: {_describe_difference(actual[name], expected[name])}" if name in actual else f"{name} is missing"
        for name in expected
        if name not in actual or not torch.equal(actual[name].double(), expected[name].double())
    ]
    return ExactCheck(what, len(expected), tuple(differing))


def _describe_difference(actual: Tensor, expected: Tensor) -> str:
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    wrong = (actual.double() != expected.double()).nonzero()
    first = tuple(wrong[0].tolist())
    found = f"{actual[first]:g} instead of {expected[first]:g}"
    return f"{len(wrong)} of {actual.numel()} elements, at {list(first)} {found}"


def _check_traces(config: RunConfig, rank: int, result: RankResult) -> Iterator[TraceCheck]:
    at = config.parallel.mesh_shape.coordinates(rank)
    for phase, issued, moved in zip(list_phases(config), result.traces, result.transferred, strict=True):
        promised = list_promised_collectives(config, rank, phase)
        yield TraceCheck(rank, len(promised), find_difference(promised, issued), phase=phase.name)
        if config.parallel.pp > 1:
            transfers = derive_transfers(config, build_setting(config, at.tp, at.cp), at.pp)
            difference = find_transfer_difference(transfers, moved)
            yield TraceCheck(rank, len(transfers), difference, "transfers", phase=phase.name)


def check_messages(rank: int, result: RankResult) -> TraceCheck:
    """Compare the messages of collective GEMMs with the schedules that ran."""
    promised = list_promised_messages(result.programs)
    moved = [each for each in result.moved if not is_of_ring(each)]
    return TraceCheck(rank, len(promised), find_message_difference(promised, moved), "messages")


def _check_ring(config: RunConfig, rank: int, result: RankResult) -> TraceCheck:
    promised = list_ring_messages(config, rank)
    moved = [each for each in result.moved if is_of_ring(each)]
    return TraceCheck(rank, len(promised), find_message_difference(promised, moved), "ring messages")


def _build_budget(config: RunConfig) -> ErrorBudget:
    model, precision = config.model, config.precision
    query = model.num_heads * model.head_width
    longest = max(config.tokens_per_step, model.width, query, model.mlp_width, model.vocab_size)
    dtypes = (str(precision.compute), str(precision.reduce_dtype))
    coarsest = next(dtype for dtype in ("bfloat16", "float32", "float64") if dtype in dtypes)
    return build_budget(coarsest, num_layers=model.num_layers, longest_sum=longest)


def describe_run(config: AnyRun, num_parameters: int) -> dict[str, str | int | bool]:
    """What was verified, for the head of a report."""
    recipe = config.quantization.resolved
    return {
        "model": config.name,
        "num_layers": config.model.num_layers,
        "num_parameters": num_parameters,
        "mesh": str(config.parallel.mesh_shape),
        "tp": config.parallel.tp,
        "sequence_parallel": config.parallel.sequence_parallel,
        "context": f"{config.context.method} {config.context.order}" if config.parallel.cp > 1 else "none",
        "overlap": config.overlap.asked,
        "batch": config.tokens_per_step // config.seq_len,
        "seq_len": config.seq_len,
        "compute": config.precision.compute,
        "reduce": config.precision.reduce_dtype,
        "quantization": "none" if recipe is None else recipe.name,
        "seed": config.seed,
    }
