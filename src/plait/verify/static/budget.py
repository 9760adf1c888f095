"""How far a model computed in one precision may be from the same model computed exactly."""

from dataclasses import dataclass
from math import sqrt

_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}

_DEVIATIONS = 4
"""The worst of a tensor's elements is compared, and the worst of 10^4 normal deviates is 4 standard deviations out."""


@dataclass(frozen=True)
class ErrorBudget:
    """The error allowed in any compared value, relative to the typical size of its tensor.

    A GEMM that sums K terms in float32 is off by about sqrt(K) * eps(float32), because the roundings of the partial
    sums add up like a random walk, and its result is rounded to the compute dtype once more. A value that has come
    through n GEMMs has gathered n such errors, again independent: they grow with sqrt(n). A float64 model sums in
    float64; a quantizer between its GEMMs adds nothing, as it sees float32, which errors of 1e-15 do not change.

        dtype: compute dtype. longest_sum: K, terms of the longest sum in the model. num_gemms: n, GEMMs on the longest
        path. Forward they are 5 a block (projection, scores, values or up, out, down) and the two ends of the model; a
        gradient comes through as many forward, as many backward, and is multiplied with
            forward values that have come through as many of their own.
    """

    dtype: str
    longest_sum: int
    num_gemms: int

    @property
    def accumulator(self) -> str:
        """In what GEMMs sum."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def value(self) -> float:
        """The largest relative error allowed."""
        per_gemm = _EPSILON[self.dtype] + sqrt(self.longest_sum) * _EPSILON[self.accumulator]
        return _DEVIATIONS * sqrt(self.num_gemms) * per_gemm

    def __str__(self) -> str:
        per_gemm = f"(eps({self.dtype}) + sqrt(K) * eps({self.accumulator}))"
        return (
            f"budget {self.value:.1e} = {_DEVIATIONS} * sqrt(n) * {per_gemm}: "
            f"n = {self.num_gemms} GEMMs on the path, K = {self.longest_sum} terms in the longest sum"
        )


def build_budget(dtype: str, *, num_layers: int, longest_sum: int) -> ErrorBudget:
    """The budget of a transformer of `num_layers` blocks, run forward and backward."""
    num_forward = 5 * num_layers + 2
    return ErrorBudget(dtype, longest_sum, 3 * num_forward)
