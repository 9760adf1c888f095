"""Verifies a sharded model against its unsharded twin: every number of one training step, and every collective."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.config.run import RunConfig
from plait.contract.collective import Collective
from plait.contract.training import derive_grad_norm_collectives, derive_run_model
from plait.overlap.receipt import build_empty_receipt
from plait.verify.report import ExactCheck, Report, TensorError, TraceCheck
from plait.verify.runtime import twin
from plait.verify.runtime.compare import Measure, Step
from plait.verify.runtime.pieces import Assembly
from plait.verify.runtime.sharded import RankResult, run_sharded
from plait.verify.static.budget import ErrorBudget, build_budget
from plait.verify.static.trace import find_difference, find_message_difference, list_promised_messages


class Ranks(Protocol):
    """Launched ranks (`plait.comm.launch.LocalRanks`)."""

    def call(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Run `function` on every rank and return the results in rank order."""


@dataclass(frozen=True)
class Reference:
    """What the unsharded model computes for a config."""

    budget: ErrorBudget
    measure: Measure
    reordering_errors: dict[tuple[str, str], float]
    initial: dict[str, Tensor]
    integers: dict[str, Tensor]


def build_reference(config: RunConfig) -> Reference:
    """Run the unsharded model, exactly and reordered."""
    budget = _build_budget(config)
    measure = Measure(twin.run_exact_step(config), config.train, budget.value)
    reordered = {(quantity, name): error for quantity, name, error in measure.errors(twin.run_reordered_step(config))}
    return Reference(budget, measure, reordered, twin.run_initialized(config), twin.run_integers(config))


def check_parity(config: RunConfig, ranks: Ranks, reference: Reference | None = None) -> Report:
    """Run the sharded model on `ranks` and compare it with its unsharded twin.

    A `reference` of the same model, batch and precision may be shared between degrees and modes.
    """
    reference = reference or build_reference(config)
    with TemporaryDirectory(prefix="plait-verify-") as folder:
        results = ranks.call(run_sharded, config=config, folder=folder)
        assembly = Assembly(folder, [result.ownership for result in results])
        exact = [
            _compare_exactly("initial weights", assembly.whole("initial"), reference.initial),
            _compare_exactly("linear regions on integers", assembly.whole("integers"), reference.integers),
        ]
        errors = _measure_errors(assembly, reference)
        if config.parallel.tp > 1:
            exact.append(ExactCheck("replicas", assembly.num_replicated, tuple(assembly.differing)))
    traces = [_check_trace(config, rank, result.trace) for rank, result in enumerate(results)]
    if config.overlap.policy != "disabled":
        traces += [_check_messages(rank, result) for rank, result in enumerate(results)]
    receipt = results[0].receipt or build_empty_receipt(config.overlap.asked)
    return Report(_describe(config), reference.budget, tuple(errors), tuple(exact), tuple(traces), receipt)


def _measure_errors(assembly: Assembly, reference: Reference) -> list[TensorError]:
    scalars = {name: assembly.whole(name)[name] for name in ("logits", "loss", "gradient norm")}
    step = Step(
        scalars["logits"], scalars["loss"], assembly.whole("gradient"), scalars["gradient norm"],
        assembly.whole("update"),
    )  # fmt: skip
    return [
        TensorError(quantity, name, error, reference.reordering_errors[quantity, name])
        for quantity, name, error in reference.measure.errors(step)
    ]


def _compare_exactly(what: str, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> ExactCheck:
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


def _check_trace(config: RunConfig, rank: int, issued: Sequence[Collective]) -> TraceCheck:
    contract = derive_run_model(config, rank)
    promised = (*contract.micro_batch_collectives, *derive_grad_norm_collectives(contract.setting))
    return TraceCheck(rank, len(promised), find_difference(promised, issued))


def _check_messages(rank: int, result: RankResult) -> TraceCheck:
    promised = list_promised_messages(result.programs)
    return TraceCheck(rank, len(promised), find_message_difference(promised, result.moved), "messages")


def _build_budget(config: RunConfig) -> ErrorBudget:
    model, precision = config.model, config.precision
    query = model.num_heads * model.head_width
    longest = max(config.tokens_per_micro_batch, model.width, query, model.mlp_width, model.vocab_size)
    coarsest = "bfloat16" if "bfloat16" in (precision.compute, precision.reduce_dtype) else "float32"
    return build_budget(coarsest, num_layers=model.num_layers, longest_sum=longest)


def _describe(config: RunConfig) -> dict[str, str | int | bool]:
    return {
        "model": config.name,
        "num_layers": config.model.num_layers,
        "num_parameters": config.model.num_parameters,
        "tp": config.parallel.tp,
        "sequence_parallel": config.parallel.sequence_parallel,
        "overlap": config.overlap.asked,
        "batch": config.train.micro_batch_size,
        "seq_len": config.seq_len,
        "compute": config.precision.compute,
        "reduce": config.precision.reduce_dtype,
        "seed": config.seed,
    }
