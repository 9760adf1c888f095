"""Small random models of transformers, one of each architecture, in float64; and what a rank is to have of them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.comm.mesh import Mesh
from plait.hf.stored import stored_of
from plait.parallel.apply import ownership_of
from plait.parallel.shard import shard_tensor

VOCAB = 67
"""Cut unevenly at every degree that tests have."""

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5, "head_dim": 4},
    "qwen2": {"tie_word_embeddings": True},
}
"""What each needs beside the sizes that all share, by transformers' name of the architecture."""


def build_config(name: str, **other: Any) -> Any:
    """The config of a small model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(name, **{**_SIZES, **ARCHITECTURES[name], **other})


def build_model(name: str, **other: Any) -> Any:
    """A small model in float64, in evaluation mode, whose weights are all random (also norms and biases)."""
    from transformers import AutoModelForCausalLM

    config = build_config(name, **other)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, param in model.named_parameters():
            values = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            is_scale = param.dim() == 1 and path.endswith("weight")
            param.copy_(1 + 0.3 * values if is_scale else 0.3 * values)
    return model.eval()


def draw_ids(*shape: int, seed: int = 1) -> Tensor:
    """Token ids, the same on every rank."""
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


class KeepFloat64(TorchFunctionMode):
    """Casts of float64 tensors to float32, which transformers writes into norms, softmax and losses, do nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            with self:  # also for what is computed again there
                return func(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in kwargs.items()}
        return func(*args, **kwargs)


def cut_as(model: nn.Module, mesh: Mesh, whole: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """What this rank's parameters of a parallel model are to hold, of tensors by their names in a checkpoint."""
    stored, ownership = stored_of(model), ownership_of(model)
    own: dict[str, Tensor | None] = {}
    for name, place in stored.items():
        tensor = whole[place.name]
        if tensor is not None:
            assert tuple(tensor.shape) == place.shape, name
            if place.dim is not None and place.interval is not None:
                tensor = tensor.narrow(place.dim, place.interval.start, len(place.interval))
            tensor = shard_tensor(tensor.t() if place.is_transposed else tensor, ownership[name], mesh.tp.rank)
        own[name] = tensor
    return own
