"""Pieces of work that can be measured: a module, its roles, and what goes in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from plait.comm.mesh import Mesh
from plait.config.model import LlamaConfig, ModelConfig
from plait.config.quantization import QuantizationConfig
from plait.config.recipe import Recipe
from plait.contract.model import derive_plan
from plait.contract.plan import Role
from plait.errors import ConfigError
from plait.models.attention import GptAttention, LlamaAttention
from plait.models.gpt import GptBlock
from plait.models.llama import LlamaBlock
from plait.models.mlp import GptMLP, LlamaMLP
from plait.models.rope import build_rope_tables
from plait.parallel.loss import vocab_parallel_cross_entropy

What = Literal["mlp", "attention", "block", "ends"]
"""Parts of a model: an MLP, an attention, both with their norms, or the embedding, the head and the loss."""

WHATS: tuple[str, ...] = get_args(What)

_BLOCK = "layers.*."

Run = Callable[[nn.Module, Tensor, Mesh], Tensor]
"""Forward of the module on this rank's input."""


@dataclass(frozen=True)
class Workload:
    """What is computed, forward and backward.

    Attributes:
        build: the whole module, with the same weights on every rank.
        width: of the activations that go in; None where token ids do.
        vocab_size: of the ids.
        run: its forward.
        quantization: precision recipe of its linears.
    """

    name: str
    build: Callable[[], nn.Module]
    roles: Mapping[str, Role | str]
    num_tokens: int
    width: int | None
    run: Run
    vocab_size: int = 0
    sequence_parallel: bool = True
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    quantization: QuantizationConfig | None = None

    @property
    def recipe(self) -> Recipe | None:
        """How its linears are quantized, if they are."""
        return None if self.quantization is None else self.quantization.resolved

    @property
    def recipe_name(self) -> str:
        """Of what its linears are quantized by, or `none`."""
        return "none" if self.recipe is None else self.recipe.name

    def draw_input(self) -> Tensor:
        """All tokens, the same on every rank: `[T, D]`, or ids `[T]`."""
        draw = torch.Generator().manual_seed(1)
        if self.width is None:
            return torch.randint(self.vocab_size, (self.num_tokens,), generator=draw)
        return torch.randn(self.num_tokens, self.width, generator=draw).to(self.dtype)


def build_workload(
    what: What,
    config: ModelConfig,
    num_tokens: int,
    *,
    sequence_parallel: bool = True,
    dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype | None = None,
    quantization: QuantizationConfig | None = None,
) -> Workload:
    """A part of a model of ours, on one sequence of `num_tokens`; of a block that is quantized, where blocks are.

    Raises:
        ConfigError: the model has not so many positions.
    """
    if num_tokens > config.max_seq_len and what != "mlp":
        raise ConfigError(
            f"bench: {num_tokens} tokens, but the model has {config.max_seq_len} positions",
            hint=f"model.max_seq_len={num_tokens}",
        )
    workload = Workload(
        what,
        lambda: _build_module(what, config).to(dtype),
        _list_roles(what, config),
        num_tokens,
        None if what == "ends" else config.width,
        _build_run(what, config, num_tokens, dtype),
        config.vocab_size,
        sequence_parallel,
        dtype,
        reduce_dtype,
    )
    if quantization is None or quantization.resolved is None:
        return workload
    return quantize(workload, quantization)


def quantize(workload: Workload, quantization: QuantizationConfig) -> Workload:
    """The same under a precision recipe, whose linears are known by the names that they have in a model."""
    kept = {**quantization.model_dump(exclude_unset=True), "keep_first": 0, "keep_last": 0}
    if workload.width is None:
        return replace(workload, quantization=QuantizationConfig.model_validate(kept))
    path = ["layers", "0"] if workload.name == "block" else ["layers", "0", workload.name]
    roles = {".".join([*path, name]): role for name, role in workload.roles.items()}

    def build() -> nn.Module:
        module = workload.build()
        for name in reversed(path):
            module = _Holder(name, module)
        return module

    def run(module: nn.Module, x: Tensor, mesh: Mesh) -> Tensor:
        return workload.run(module.get_submodule(".".join(path)), x, mesh)

    return replace(workload, build=build, roles=roles, run=run, quantization=QuantizationConfig.model_validate(kept))


class _Holder(nn.Module):
    """Has one module, under a name."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)


class _Ends(nn.Module):
    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens_T: Tensor) -> Tensor:
        return self.head(self.embedding(tokens_T))


def _list_roles(what: What, config: ModelConfig) -> dict[str, Role | str]:
    """Those of the part, under the names that it has alone."""
    roles = derive_plan(config).roles
    if what == "ends":
        return {name: roles[name] for name in ("embedding", "head")}
    inside = {name.removeprefix(_BLOCK): role for name, role in roles.items() if name.startswith(_BLOCK)}
    if what == "block":
        return inside
    return {name.removeprefix(f"{what}."): role for name, role in inside.items() if name.startswith(f"{what}.")}


def _build_module(what: What, config: ModelConfig) -> nn.Module:
    torch.manual_seed(0)
    if what == "ends":
        return _Ends(config.vocab_size, config.width)
    if isinstance(config, LlamaConfig):
        return {"mlp": LlamaMLP, "attention": LlamaAttention, "block": LlamaBlock}[what](config)
    return {"mlp": GptMLP, "attention": GptAttention, "block": GptBlock}[what](config)


def _build_run(what: What, config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> Run:
    size_BS = (1, num_tokens)
    if what == "mlp":
        return lambda module, x, mesh: module(x)
    if what == "ends":
        return lambda module, x, mesh: vocab_parallel_cross_entropy(module(x), x, mesh, vocab_size=config.vocab_size)
    if not isinstance(config, LlamaConfig):
        return lambda module, x, mesh: module(x, size_BS)
    rope = build_rope_tables(config, torch.arange(num_tokens), like=torch.empty((), dtype=dtype))
    return lambda module, x, mesh: module(x, size_BS, rope)
