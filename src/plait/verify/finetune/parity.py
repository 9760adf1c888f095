"""Compares a run's step on a directory with that of transformers alone: every number, and what ranks issued."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from tempfile import TemporaryDirectory

from torch import Tensor

from plait.config.run import FineTuneConfig
from plait.contract.axis.directory import derive_directory_collectives
from plait.contract.collective import Collective
from plait.hf.directory.source import take_part
from plait.hf.stored import Stored
from plait.overlap.receipt import build_empty_receipt
from plait.verify.finetune.promises import Promises
from plait.verify.finetune.sharded import DirectoryResult, run_sharded
from plait.verify.finetune.twin import Twin, run_twin
from plait.verify.report import ExactCheck, Report, TensorError, TraceCheck
from plait.verify.runtime.compare import Measure, Step
from plait.verify.runtime.parity import Ranks, assemble_step, check_messages, compare_exactly, describe_run
from plait.verify.runtime.pieces import Assembly
from plait.verify.runtime.promises import is_of_ring
from plait.verify.runtime.recipe import FIRST
from plait.verify.static.budget import ErrorBudget, build_budget
from plait.verify.static.trace import find_difference, find_message_difference


def check_directory_parity(config: FineTuneConfig, ranks: Ranks, twin: Twin | None = None) -> Report:
    """Run the sharded step on `ranks` and compare it with that of transformers.

    A `twin` of the same directory, batch and precision may be shared between meshes.
    """
    twin = twin or run_twin(config)
    with TemporaryDirectory(prefix="plait-verify-") as folder:
        results: list[DirectoryResult] = ranks.call(run_sharded, config=config, folder=folder)
        assembly = Assembly(folder, [result.parts for result in results])
        initial, step = assembly.whole("initial"), assemble_step(assembly, FIRST)
    stored, budget = results[0].stored, _build_budget(config)
    sizes = {place.name: prod(place.shape) for place in stored.values()}
    measure = Measure(_rename(twin.exact, stored), config.train, budget.value)
    rounding = {(what, name): error for what, name, error in measure.errors(_rename(twin.reordered, stored))}
    exact = [compare_exactly("initial weights", initial, _take_parts(twin.initial, stored))]
    if len(results) > 1:
        exact.append(ExactCheck("replicas", assembly.num_replicated, tuple(assembly.differing)))
    return Report(
        describe_run(config, sum(sizes.values())),
        budget,
        tuple(TensorError(what, name, error, rounding[what, name]) for what, name, error in measure.errors(step)),
        tuple(exact),
        tuple(_list_traces(config, results)),
        results[0].receipt or build_empty_receipt(config.overlap.asked),
    )


def _take_parts(tensors: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """What ranks call a parameter, of tensors as the directory has them."""
    return {name: take_part(tensors[place.name], place) for name, place in stored.items() if place.name in tensors}


def _rename(step: Step, stored: Mapping[str, Stored]) -> Step:
    return replace(step, gradients=_take_parts(step.gradients, stored), updated=_take_parts(step.updated, stored))


def _list_traces(config: FineTuneConfig, results: list[DirectoryResult]) -> Iterator[TraceCheck]:
    """Collectives over every axis but tp, which the sources of the architecture decide, and all messages."""
    promises = Promises(config)
    for rank, result in enumerate(results):
        model = promises.describe(result.owned, rank)
        promised = derive_directory_collectives(config, model, promises.list_masks(rank))
        issued = [each for each in result.traces[0] if not _is_of_tp(each)]
        yield TraceCheck(rank, len(promised), find_difference(promised, issued))
        if config.overlap.policy != "disabled":
            yield check_messages(rank, result)
        if config.parallel.cp > 1 and config.context.method == "ring":
            messages = promises.list_ring_messages(model, rank)
            moved = [each for each in result.moved if is_of_ring(each)]
            yield TraceCheck(rank, len(messages), find_message_difference(messages, moved), "ring messages")


def _is_of_tp(collective: Collective) -> bool:
    return collective.axis.partition("/")[0] == "tp"


def _build_budget(config: FineTuneConfig) -> ErrorBudget:
    model, precision = config.model, config.precision
    query = model.num_heads * model.head_width
    longest = max(config.tokens_per_step, model.width, query, model.mlp_width or 4 * model.width, model.vocab_size)
    coarsest = "bfloat16" if "bfloat16" in (precision.compute, precision.reduce_dtype) else "float32"
    # Through an adapter each linear is two GEMMs.
    num_layers = model.num_layers * (1 if model.lora is None else 2)
    return build_budget(coarsest, num_layers=num_layers, longest_sum=longest)
