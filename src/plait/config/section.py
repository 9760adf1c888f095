"""What every section of a config is: frozen, strictly typed, without unknown keys; and the problems it may have.

Problems are values, so that all of a config's can be collected and reported together.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
"""At least one of something, and so few that the product of two counts is still an index."""

Every = Annotated[int, Field(ge=0)]
"""An interval in steps; 0 means never."""

Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""How long something may take; what waits for it counts in a type that has no room for much more."""

Probability = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class Problem:
    """What is wrong with the value of `key` (`parallel.tp`)."""

    key: str
    text: str
    hint: str | None = None

    def within(self, section: str) -> "Problem":
        """The same problem, its key seen from outside `section`."""
        return replace(self, key=".".join(part for part in (section, self.key) if part))


class Section(BaseModel):
    """A table of the config; a subclass states in `conflicts` what its fields must satisfy together."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    renamed: ClassVar[Mapping[str, Problem]] = {}
    """Keys that a section had once, and what to write in their place."""

    def conflicts(self) -> Iterable[Problem]:
        """Problems between fields that are valid on their own, with keys seen from this section."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            _refuse([problem for name, problem in cls.renamed.items() if name in given])
        return given

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        _refuse(list(self.conflicts()))
        return self


def _refuse(problems: list[Problem]) -> None:
    if problems:
        listed = "; ".join(f"{problem.key}: {problem.text}" for problem in problems)
        raise PydanticCustomError("conflicts", "{listed}", {"listed": listed, "problems": problems})


def list_problems(error: ValidationError) -> list[Problem]:
    """What pydantic found, as problems with the keys that the user wrote."""
    problems: list[Problem] = []
    for detail in error.errors(include_url=False):
        key = _build_key(detail["loc"])
        match detail["type"]:
            case "conflicts":
                problems += [problem.within(key) for problem in detail["ctx"]["problems"]]
            case "missing":
                problems.append(Problem(key, "is required"))
            case "extra_forbidden":
                problems.append(Problem(key, "is no known key"))
            case "model_type" | "model_attributes_type":
                problems.append(Problem(key, "should be a table"))
            case "literal_error":
                hint = _describe_near(str(detail["input"]), detail["ctx"]["expected"])
                problems.append(Problem(key, detail["msg"].removeprefix("Input "), hint))
            case "default_factory_not_called":
                pass  # the value it is derived from is the problem, and is reported
            case _:
                problems.append(Problem(key, detail["msg"].removeprefix("Input ")))
    return problems


def _describe_near(value: str, expected: str) -> str | None:
    """The one of `'none', 'mxfp8' or 'nvfp4'` that a value was meant to be; all of them are in the message already."""
    near = get_close_matches(value, re.findall(r"'([^']*)'", expected), n=1)
    return f'did you mean "{near[0]}"?' if near else None


_TAGS = (["llama"], ["gpt"])


def _build_key(location: tuple[int | str, ...]) -> str:
    """Dotted, without the tag of the model's family that pydantic puts behind `model`."""
    parts = [str(part) for part in location]
    if parts[:1] == ["model"] and parts[1:2] in _TAGS:
        del parts[1]
    return ".".join(parts)
