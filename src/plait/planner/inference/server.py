"""What a server decides, and what is asked of it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from plait.config.overlap import OverlapConfig
from plait.config.precision import PrecisionConfig
from plait.errors import ConfigError, describe_nearest
from plait.planner.laws.collective import Launch
from plait.planner.plan_config import PlanConfig, Quantization
from plait.sharding import MAX_TP

_WHERE_IT_PAYS = OverlapConfig(policy="auto")
_BFLOAT16 = PrecisionConfig()


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How one replica of a model is served by `tp` devices.

    Attributes:
        sequence_parallel: whether prompts are read with tokens sharded between the linears (None: whichever is faster
            of the two). Tokens are always generated in all-reduce mode: there are too few of them to shard.
        launch: whether the collectives of a generated token are launched from a graph or by the host.
        quantization: in which form linears inside blocks keep their weights and read their inputs; with the scales of
            `fp8_delayedscaling` known beforehand a quantise pass is one kernel. Head, embedding and KV cache stay.
    """

    tp: int = 1
    sequence_parallel: bool | None = None
    launch: Launch = "graph"
    quantization: Quantization = "none"
    overlap: OverlapConfig = _WHERE_IT_PAYS
    precision: PrecisionConfig = _BFLOAT16

    def in_mode(self, sequence_parallel: bool) -> "ServerConfig":
        """The same, with the mode in which prompts are read."""
        return replace(self, sequence_parallel=sequence_parallel)

    def build_plan(self, num_sequences: int, *, sequence_parallel: bool) -> PlanConfig:
        """The plan by which the planner's layers time a forward of so many sequences."""
        return PlanConfig(
            tp=self.tp,
            sequence_parallel=sequence_parallel,
            micro_batch=num_sequences,
            sharded="nothing",
            overlap=self.overlap,
            precision=self.precision,
            quantization=self.quantization,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are alike, on one replica.

    Attributes:
        batch: requests that are answered together, a token of each in every step.
        prompt_len: tokens of a prompt.
        generate_len: tokens of an answer; the first comes with the prompt's forward.
        prefill_batch: prompts that are read together.
    """

    batch: int
    prompt_len: int
    generate_len: int
    prefill_batch: int = 1

    @property
    def context_len(self) -> int:
        """Tokens of a request at its end, whose keys and values are kept."""
        return self.prompt_len + self.generate_len

    @property
    def mean_context_len(self) -> int:
        """Tokens that a generated one looks back on, on the average."""
        return self.prompt_len + max(1, self.generate_len // 2)

    @property
    def num_prefills(self) -> int:
        """How often prompts are read until every request of the batch has its first token."""
        return -(-self.batch // self.prefill_batch)


def check_load(load: Load, max_seq_len: int) -> None:
    """Raise one error that lists everything that cannot be."""
    problems = [f"{each.name} = {value}, but must be at least 1" for each, value in _list_values(load) if value < 1]
    if not problems and load.prefill_batch > load.batch:
        problems.append(f"prefill_batch = {load.prefill_batch} prompts read together, of a batch of {load.batch}")
    if load.context_len > max_seq_len:
        problems.append(
            f"prompt_len + generate_len = {load.prompt_len} + {load.generate_len} = {load.context_len} tokens, but the "
            f"model has positions for {max_seq_len}"
        )
    if problems:
        raise ConfigError.from_problems("inference", problems)


def _list_values(load: Load) -> list[tuple[Any, int]]:
    return [(each, getattr(load, each.name)) for each in fields(load)]


def check_server(server: ServerConfig, num_devices: int) -> None:
    """Raise if the cluster has not enough devices for one replica."""
    if not 1 <= server.tp <= min(num_devices, MAX_TP):
        raise ConfigError(
            f"inference: tp = {server.tp} of {num_devices} devices", hint=f"use 1 to {min(num_devices, MAX_TP)}"
        )


def build_server_config(fixed: Mapping[str, Any]) -> ServerConfig:
    """The server of which so much is fixed.

    Raises:
        ConfigError: everything that a server does not decide, and values that it cannot have.
    """
    problems = [problem for name, value in fixed.items() if (problem := _find_problem(name, value))]
    if problems:
        raise ConfigError.from_problems("inference", problems)
    return ServerConfig(**fixed)


def _find_problem(name: str, value: Any) -> str:
    if name == "tp":
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return "" if is_count else f"tp = {value} should be a whole number from 1"
    if name in _CHOICES:
        choices = ", ".join(str(choice).lower() for choice in _CHOICES[name])
        return "" if value in _CHOICES[name] else f"{name} = {value} should be one of {choices}"
    if name in _SECTIONS:
        return "" if isinstance(value, _SECTIONS[name]) else f"{name} = {value} should be a {_SECTIONS[name].__name__}"
    known = ("tp", *_CHOICES, *_SECTIONS)
    return f"{name} = {value} is nothing that a server decides ({describe_nearest(name, known)})"


_CHOICES: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (True, False),
    "launch": get_args(Launch),
    "quantization": get_args(Quantization),
}

_SECTIONS: dict[str, type] = {"overlap": OverlapConfig, "precision": PrecisionConfig}
