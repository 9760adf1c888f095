"""What a call of a model over a context axis, or with documents, takes: own tokens, whose positions it finds itself."""

from typing import Any

from torch import Tensor, nn

from plait.comm.mesh import Mesh
from plait.errors import ConfigError
from plait.parallel.context.sequences import ContextPositions
from plait.parallel.region.arguments import Arguments

_OF_WHOLE = ("attention_mask", "position_ids", "cache", "past_key_values")
"""Arguments that speak of whole sequences, or of tokens that came before."""


class OwnTokens:
    """A hook on a base model, and what such a model has instead of `generate`."""

    def __init__(self, mesh: Mesh, kind: str) -> None:
        self.positions = ContextPositions(mesh, kind)
        self.kind = kind

    def install(self, model: nn.Module, base: nn.Module) -> None:
        """Hook this into a model."""
        base.register_forward_pre_hook(self.enter, with_kwargs=True)
        model.generate = self.refuse_to_generate  # type: ignore[assignment]

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """In front of the base model: say where in their sequences the tokens are.

        Raises:
            ConfigError: the caller says something of whole sequences.
            ShardingError: nothing said how long they are, or the tokens are not those of this rank.
        """
        given = next((name for name in _OF_WHOLE if kwargs.get(name) is not None), None)
        if given is not None:
            raise ConfigError(
                f"{self.kind}: {given}: over a context axis, or with documents, it places its tokens by itself",
                hint="call plait.enter_sequences(model, seq_len), then model(plait.take_own_tokens(ids, mesh))",
            )
        tokens = _find_tokens(args, kwargs)
        positions = self.positions((tokens.shape[0], tokens.shape[1]), tokens.device)
        return args, {**kwargs, "position_ids": positions.view(-1, tokens.shape[1]), "use_cache": False}

    def refuse_to_generate(self, *_: Any, **__: Any) -> None:
        """A new token would be one more of every rank."""
        raise ConfigError(
            f"{self.kind}.generate: sequences that are cut over context ranks, or have documents, do not grow",
            hint="generate on a mesh with cp of 1, with a model that was made parallel without documents",
        )


def _find_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Ids `[B, S/cp]`, or embeddings `[B, S/cp, D]`."""
    given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    return next(each for each in given if isinstance(each, Tensor))
