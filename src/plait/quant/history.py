"""The largest magnitudes of tensors at earlier steps, by which delayed scaling goes (Micikevicius et al., 2209.05433).

Every rank has the histories of all tensors of its model: they are of whole tensors, and the same at every degree.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.contract.quantization import What

_NONE = -1.0
"""Where there is no magnitude: those there are are not negative."""


class AmaxHistories:
    """Those of all tensors of a model that go by them.

    Attributes:
        names: of the tensors, module and tensor (`layers.1.mlp.w_up.input`).
        values: float32 `[N, length]`, the latest first; negative where there is none yet.
        noted: float32 `[N]`, the largest since the latest update; negative where nothing was noted.
    """

    def __init__(self, names: Sequence[str], length: int, device: torch.device | str) -> None:
        self.names = tuple(names)
        self.values = torch.full((len(names), length), _NONE, device=device)
        self.noted = torch.full((len(names),), _NONE, device=device)
        self._places = {name: place for place, name in enumerate(self.names)}
        self.refresh()

    @property
    def length(self) -> int:
        """How many steps it looks back."""
        return self.values.shape[1]

    def of(self, module: str) -> "LinearHistory":
        """Those of the tensors of linear `module`."""
        return LinearHistory(self, [module])

    def note(self, name: str, amax: Tensor) -> None:
        """Remember a magnitude for the next update, if it is the largest."""
        noted = self.noted[self._places[name]]
        torch.maximum(noted, amax, out=noted)

    def find_amax(self, name: str) -> Tensor | None:
        """The largest in the history, float32 without dims; None before the first update that knew one."""
        place = self._places[name]
        return None if self._is_empty[place] else self._largest[place]

    def update(self, amaxes: Tensor) -> None:
        """Begin a step with what all ranks have `noted` together, `[N]`; a tensor nobody saw keeps its history."""
        is_seen = (amaxes >= 0) & amaxes.isfinite()
        shifted = torch.cat((amaxes[:, None], self.values[:, :-1]), dim=1)
        self.values.copy_(torch.where(is_seen[:, None], shifted, self.values))
        self.noted.fill_(_NONE)
        self.refresh()

    def refresh(self) -> None:
        """Go by `values` that were overwritten."""
        self._largest = self.values.amax(1) if self.values.numel() else self.noted
        self._is_empty = (self._largest < 0).tolist()


class LinearHistory:
    """The histories of the tensors of one linear, or of several that read one input, which each of them has."""

    def __init__(self, histories: AmaxHistories, modules: Sequence[str]) -> None:
        self._histories = histories
        self._modules = tuple(modules)

    def note(self, tensor: What, amax: Tensor) -> None:
        """Remember a float32 number for the next update."""
        for module in self._modules if tensor == "input" else self._modules[:1]:
            self._histories.note(f"{module}.{tensor}", amax)

    def find_amax(self, tensor: What) -> Tensor | None:
        """The largest in the history, a float32 number; None before the first update."""
        return self._histories.find_amax(f"{self._modules[0]}.{tensor}")

    def share_input(self, modules: Sequence[str]) -> "LinearHistory":
        """The same for the first of linears `modules`, all of which read its input."""
        return LinearHistory(self._histories, modules)
