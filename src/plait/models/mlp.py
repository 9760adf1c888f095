"""The MLP of the Llama and GPT-2 families."""

from torch import Tensor, nn

from plait.config.model import GptConfig, LlamaConfig
from plait.models.activation import Gelu, SwiGLU


class LlamaMLP(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202): `w_down(silu(w_gate(x)) * w_up(x))`, `[T, D] -> [T, F] -> [T, D]`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w_gate = nn.Linear(config.width, config.mlp_width, bias=False)
        self.w_up = nn.Linear(config.width, config.mlp_width, bias=False)
        self.activation = SwiGLU()
        self.w_down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Apply to every token alone."""
        return self.w_down(self.activation(self.w_gate(x_TD), self.w_up(x_TD)))


class GptMLP(nn.Module):
    """`w_down(gelu(w_up(x)))` with biases, `[T, D] -> [T, F] -> [T, D]`, and GPT-2's tanh form of GELU."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.w_up = nn.Linear(config.width, config.mlp_width)
        self.activation = Gelu(approximate="tanh")
        self.w_down = nn.Linear(config.mlp_width, config.width)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Apply to every token alone."""
        return self.w_down(self.activation(self.w_up(x_TD)))
