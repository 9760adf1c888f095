"""Dropout whose mask is a function of seed, module name and global token index: the same for every dp and tp degree.

Nothing is drawn from a generator, so a mask can be drawn again (activation checkpointing, resume, another mesh) and
every cut of the tokens or heads sees its part of one mask.
"""

from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.handle import Handled, find_by_handle
from plait.comm.mesh import Mesh
from plait.errors import ConfigError, ShardingError
from plait.parallel.precision.model import find_precisions
from plait.parallel.rng import bernoulli_mask, derive_key
from plait.parallel.tokens import check_own_tokens, current_tokens
from plait.sharding import Interval, Split


class KeyedDropout(Handled, nn.Module):
    """What all dropouts share: the rate, and the key and position that fix the mask."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError(f"a dropout rate of {p} is not 0 <= p < 1")
        self.p = p
        self.key: int | None = None
        self.first_token: int | None = None
        self._register()

    @property
    def is_active(self) -> bool:
        """Whether forward changes anything."""
        return self.training and self.p > 0

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def draw_mask(self, shape: torch.Size, device: torch.device) -> Tensor:
        """What is kept of a tensor of `shape` in this pass."""
        raise NotImplementedError(type(self).__name__)

    def _apply_mask(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            # Key and position are read when it runs: as numbers in a graph they would be those of one layer and step.
            return x * draw_mask(x, self.handle) * (1 / (1 - self.p))
        return _Mask.apply(x, self.draw_mask(x.shape, x.device), 1 / (1 - self.p))

    def _draw(
        self,
        shape: torch.Size,
        intervals: tuple[Interval, ...],
        global_shape: tuple[int, ...],
        device: torch.device,
    ) -> Tensor:
        if self.key is None:
            raise ConfigError(
                "dropout in training mode has no seed, so its mask is not defined",
                hint="call plait.seed_dropout(model, seed) once, after building the model",
            )
        return bernoulli_mask(self.key, intervals, global_shape, 1 - self.p, device=device).view(shape)

    def _require_first_token(self) -> int:
        if self.first_token is None:
            raise ConfigError(
                "dropout in training mode does not know its tokens' position in the run: every step would get one mask",
                hint="call plait.set_dropout_offset(model, first_token) before each forward",
            )
        return self.first_token


class TokenDropout(KeyedDropout):
    """What dropouts of activations share: which tokens of the run they see."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.context_mesh: Mesh | None = None

    def apply_context(self, mesh: Mesh) -> None:
        """Read from `mesh.sequences` which tokens of each sequence this rank has (context parallelism)."""
        self.context_mesh = mesh

    def _draw_tokens(
        self, shape: torch.Size, own: Interval, features: Interval, width: int, device: torch.device
    ) -> Tensor:
        """The mask of tokens `own` of this rank's part of the micro-batch, and of `features` of `width`."""
        first_token = self._require_first_token()
        runs = [own] if self.context_mesh is None else self._list_runs(self.context_mesh, own)
        rows = [Interval(first_token + run.start, first_token + run.stop) for run in runs]
        if len(rows) == 1:
            return self._draw(shape, (rows[0], features), (rows[0].stop, width), device)
        parts = [
            self._draw(torch.Size((len(each), len(features))), (each, features), (each.stop, width), device)
            for each in rows or [Interval(0, 0)]
        ]
        return torch.cat(parts).view(shape)

    def _list_runs(self, mesh: Mesh, own: Interval) -> list[Interval]:
        """Where own tokens of own sequence parts are in the micro-batch."""
        if mesh.sequences is None:
            raise ShardingError(
                "dropout: sequences are cut over context ranks, but nothing said how long they are",
                hint="call plait.enter_sequences(model, seq_len) before each forward",
            )
        return mesh.sequences.list_runs(own)


class Dropout(TokenDropout):
    """Dropout of activations, `[T, D]` or `[T/tp, D]` or with any leading dims of tokens.

    Element `[t, d]` of the mask belongs to token `first_token + t` of the run. Saves one byte per element for backward.
    """

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.mesh: Mesh | None = None

    def apply_mesh(self, mesh: Mesh) -> None:
        """Read from `mesh.tokens` which tokens this rank holds (sequence parallelism)."""
        self.mesh = mesh

    def forward(self, x_TD: Tensor) -> Tensor:
        """Zero each element with probability `p` and scale the rest to keep the mean."""
        if not self.is_active:
            return x_TD
        if self.mesh is not None:
            check_own_tokens(x_TD, self.mesh, "dropout")
        return self._apply_mask(x_TD)

    def draw_mask(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Of own tokens."""
        width = shape[-1]
        own = (
            Interval(0, shape[:-1].numel())
            if self.mesh is None
            else current_tokens(self.mesh, "dropout").intervals[self.mesh.tp.rank]
        )
        return self._draw_tokens(shape, own, Interval(0, width), width, device)


class FeatureDropout(TokenDropout):
    """Dropout of activations whose features are cut, `[T, F/tp]` with any leading dims of tokens.

    The mask is the own part of what `Dropout` has at degree 1. Saves one byte per element for backward.
    """

    def __init__(self, p: float, features: Split, rank: int) -> None:
        super().__init__(p)
        self.features = features
        self.own = features.intervals[rank]

    def forward(self, x_TF: Tensor) -> Tensor:
        """Zero each element with probability `p` and scale the rest to keep the mean."""
        return self._apply_mask(x_TF) if self.is_active else x_TF

    def draw_mask(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Of own features."""
        return self._draw_tokens(shape, Interval(0, shape[:-1].numel()), self.own, self.features.size, device)


class AttentionDropout(KeyedDropout):
    """Dropout of attention probabilities `[B, N, S, S]` or `[B, N/tp, S, S]`.

    The mask belongs to the global sequence and head. Saves one byte per element for backward.
    """

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.heads: tuple[Split, int] | None = None

    def apply_heads(self, split: Split, rank: int) -> None:
        """Take the heads that `split` (of heads, or of the query features) gives to tp rank `rank`."""
        self.heads = (split, rank)

    def forward(self, probabilities_BNSS: Tensor) -> Tensor:
        """Zero each probability with probability `p` and scale the rest to keep the mean."""
        return self._apply_mask(probabilities_BNSS) if self.is_active else probabilities_BNSS

    def draw_mask(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Of own heads."""
        batch, num_local, num_queries, num_keys = shape
        first, remainder = divmod(self._require_first_token(), num_queries)
        if remainder:
            raise ShardingError(f"the first token {self.first_token} does not begin a sequence of {num_queries} tokens")
        heads, num_heads = self._derive_own_heads(num_local)
        intervals = (Interval(first, first + batch), heads, Interval(0, num_queries), Interval(0, num_keys))
        return self._draw(shape, intervals, (first + batch, num_heads, num_queries, num_keys), device)

    def _derive_own_heads(self, num_local: int) -> tuple[Interval, int]:
        if self.heads is None:
            return Interval(0, num_local), num_local
        split, rank = self.heads
        own = split.intervals[rank]
        width, remainder = divmod(len(own), num_local)
        if remainder:
            raise ShardingError(f"attention dropout got {num_local} heads, but tp rank {rank} holds features {own}")
        return Interval(own.start // width, own.stop // width), split.size // width


class _Mask(torch.autograd.Function):
    """`x * mask * scale`, which keeps the one-byte mask and not `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (grad_y * mask).mul_(ctx.scale), None, None


@torch.library.custom_op("plait::draw_mask", mutates_args=())
def draw_mask(x: Tensor, dropout: Tensor) -> Tensor:
    """What this dropout keeps of `x`, whose values it does not look at."""
    found: KeyedDropout = find_by_handle(dropout)
    return found.draw_mask(x.shape, x.device)


@draw_mask.register_fake
def _(x: Tensor, dropout: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bool)


def seed_dropout(model: nn.Module, seed: int) -> None:
    """Key everything that `model` draws by `seed` and module path: dropouts, and what gradients are rounded by."""
    for name, module in model.named_modules():
        if isinstance(module, KeyedDropout):
            module.key = derive_key(seed, "dropout", name)
    for precision in find_precisions(model):
        for linear in precision.linears.values():
            linear.seed(seed)


def set_dropout_offset(model: nn.Module, first_token: int) -> None:
    """Say which token of the whole run the next forward's first token is, so that no two steps draw the same."""
    TokenOffset(model).set(first_token)


class TokenOffset:
    """What of a model has to know which token of the run is the first of a pass, found once.

    Where passes of several micro-batches are under way at once, it is said again before each goes on, backward too:
    what is computed again there draws again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._dropouts = [module for module in model.modules() if isinstance(module, KeyedDropout)]
        self._linears = [linear for each in find_precisions(model) for linear in each.linears.values()]

    def set(self, first_token: int) -> None:
        """The first token of the pass that starts, or goes on, now."""
        for dropout in self._dropouts:
            dropout.first_token = first_token
        for linear in self._linears:
            linear.set_first_token(first_token)
