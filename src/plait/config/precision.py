"""In which number formats a run computes, reduces and keeps its weights."""

from typing import Literal

from plait.config.section import Section

FloatFormat = Literal["float32", "bfloat16"]


class PrecisionConfig(Section):
    """Number formats; master weights and optimizer state are float32 always."""

    compute: FloatFormat = "bfloat16"
    """Operands of the GEMMs, activations, and what is gathered."""
    reduce: FloatFormat | None = None
    """In which format sums over ranks are carried; that of `compute` unless given."""

    @property
    def reduce_dtype(self) -> FloatFormat:
        """The format in which sums over ranks are carried."""
        return self.compute if self.reduce is None else self.reduce
