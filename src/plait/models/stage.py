"""The part of a model that a pipeline rank holds, and its stages: the same modules under the same names."""

from collections.abc import Sequence

from torch import Tensor, nn

from plait.models.gpt import GptModel
from plait.models.llama import LlamaModel
from plait.sharding import StagePart

_ENTRY = ("embedding", "position_embedding", "embedding_dropout")
_EXIT = ("norm", "head")


def keep_parts(model: LlamaModel | GptModel, parts: Sequence[StagePart]) -> None:
    """Leave of a model only what the stages of one rank hold, in place; `layers.7` stays `layers.7`.

    A table that is embedding and head stays on the ranks of both, under the name of the embedding.
    """
    kept = sorted(index for part in parts for index in part.layers)
    blocks = dict(model.layers.named_children())
    model.add_module("layers", nn.ModuleDict({str(index): blocks[str(index)] for index in kept}))
    is_first, is_last = (any(part.is_first for part in parts), any(part.is_last for part in parts))
    gone = [] if is_first else [name for name in _ENTRY if name in model._modules]
    if is_last and model.config.tied_embeddings and not is_first:
        gone.remove("embedding")
    for name in [*gone, *(() if is_last else _EXIT)]:
        delattr(model, name)


class Stage(nn.Module):
    """Some consecutive blocks of a model, as the model has them, with its ends where these are part of the stage.

    Parameters have the names that they have in the model, and are its own.
    """

    def __init__(self, model: LlamaModel | GptModel, part: StagePart) -> None:
        super().__init__()
        # In a tuple, so that only what is part of the stage is registered.
        self._model = (model,)
        self.part = part
        self._take(model, _ENTRY if part.is_first else ())
        layers = model.layers
        self.layers = nn.ModuleDict({str(index): layers.get_submodule(str(index)) for index in part.layers})
        self._take(model, _EXIT if part.is_last else ())

    def _take(self, model: nn.Module, names: Sequence[str]) -> None:
        """In the order of forward, in which the second half of a split backward goes through parameters."""
        for name in names:
            if name in model._modules:
                self.add_module(name, model.get_submodule(name))

    def forward(self, x: Tensor, size_BS: tuple[int, int]) -> Tensor:
        """Tokens `[B, S]` or what the stage before gives, `[T, D]` -> the same for the stage behind, or logits."""
        (model,) = self._model
        if self.part.is_first:
            x = model.embed(x)
        x = model.run_blocks(x, size_BS, self.layers.children())
        return model.predict(x) if self.part.is_last else x
