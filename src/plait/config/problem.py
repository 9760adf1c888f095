"""One problem of a config: the key, what is wrong with it, and how to go on; all of them are reported together."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from pydantic import ValidationError


@dataclass(frozen=True)
class Problem:
    """What is wrong with the value of `key` (`parallel.tp`)."""

    key: str
    text: str
    hint: str | None = None

    def within(self, section: str) -> "Problem":
        """The same problem, its key seen from outside `section`."""
        return replace(self, key=".".join(part for part in (section, self.key) if part))


def describe_nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean "steps"?`, or the list of what is known."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    return f'did you mean "{near[0]}"?' if near else f"known are {', '.join(names)}"


def list_problems(error: ValidationError, known_keys: Mapping[str, Iterable[str]]) -> list[Problem]:
    """What pydantic found, as problems with the keys that the user wrote.

    `known_keys` are the keys of each section (`""` the outermost), to name the nearest to an unknown one.
    """
    problems: list[Problem] = []
    for detail in error.errors(include_url=False):
        key = ".".join(map(str, detail["loc"]))
        match detail["type"]:
            case "conflicts":
                problems += [problem.within(key) for problem in detail["ctx"]["problems"]]
            case "extra_forbidden":
                section, _, name = key.rpartition(".")
                problems.append(Problem(key, "unknown key", describe_nearest(name, known_keys.get(section, ()))))
            case "missing":
                problems.append(Problem(key, "is required"))
            case "default_factory_not_called":
                pass  # the value it is derived from is the problem, and is reported
            case _:
                problems.append(Problem(key, detail["msg"].removeprefix("Input ").removeprefix("Value error, ")))
    return problems
