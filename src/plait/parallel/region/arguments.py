"""The arguments that a module is called with, by position and by name."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def map_first_tensor(function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments, the first tensor among them replaced by `function` of it; as they are where there is none."""
    if args and isinstance(args[0], Tensor):
        return (function(args[0]), *args[1:]), kwargs
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    place = next((place for place, value in given.items() if isinstance(value, Tensor)), None)
    if place is None:
        return args, kwargs
    given[place] = function(given[place])
    return tuple(given[i] for i in range(len(args))), {name: given[name] for name in kwargs}


def map_hidden_states(function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """As `map_first_tensor`, but what is given by the name of `hidden_states` is it, wherever it stands."""
    if isinstance(x := kwargs.get("hidden_states"), Tensor):
        return args, {**kwargs, "hidden_states": function(x)}
    return map_first_tensor(function, args, kwargs)
