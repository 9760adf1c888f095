"""Models of transformers that compute in float64 throughout."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """Casts of float64 tensors to float32, which transformers writes into norms, softmax and losses, do nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, without what would cast down."""
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in kwargs.items()}
        return func(*args, **kwargs)
