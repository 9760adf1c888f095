"""What every section of a config is: frozen, strictly typed, without unknown keys, and free of conflicts."""

from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from plait.config.problem import Problem

Count = Annotated[int, Field(ge=1)]
"""At least one of something."""

Every = Annotated[int, Field(ge=0)]
"""An interval in steps; 0 means never."""

Probability = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of the config; a subclass states in `conflicts` what its fields must satisfy together."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def conflicts(self) -> Iterable[Problem]:
        """Problems between fields that are valid on their own, with keys seen from this section."""
        return ()

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        problems = list(self.conflicts())
        if problems:
            listed = "; ".join(f"{problem.key}: {problem.text}" for problem in problems)
            raise PydanticCustomError("conflicts", "{listed}", {"listed": listed, "problems": problems})
        return self
