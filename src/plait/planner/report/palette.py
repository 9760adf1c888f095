"""One colour for each kind of time and of memory, on all charts; told apart by colour-blind people (Okabe and Ito)."""

from dataclasses import dataclass

from plait.planner.cost import Kind
from plait.planner.prediction import MemoryPart


@dataclass(frozen=True, slots=True)
class Ink:
    """How something is drawn.

    Attributes:
        pattern: plotly's name of a hatching, so that it is known without colours too.
        meaning: what belongs to it, for those who read the legend.
    """

    label: str
    color: str
    pattern: str = ""
    meaning: str = ""


TIME: dict[Kind, Ink] = {
    Kind.GEMM: Ink("GEMM", "#0072B2", meaning="multiplying by weights"),
    Kind.ATTENTION: Ink("attention", "#56B4E9", meaning="the attention core"),
    Kind.MEMORY_BOUND: Ink("memory-bound", "#009E73", meaning="norms, residuals, activations, the loss"),
    Kind.COMMUNICATION: Ink("communication (tp, cp, pp)", "#D55E00"),
    Kind.DATA_PARALLEL: Ink("communication (dp)", "#E69F00", meaning="gradients and parameters"),
    Kind.BUBBLE: Ink("bubble", "#8C8C8C", "/", meaning="a pipeline's rank has nothing to do"),
    Kind.OPTIMIZER: Ink("optimizer", "#CC79A7", meaning="the update, once a step"),
}
"""In the order in which they are stacked: compute, communication that nothing hides, bubble, rest."""

WAITING = Ink(
    "nothing is computed", "#D55E00", "/", "communication that a schedule does not hide, or kernels that are behind it"
)
"""In timelines, where it is drawn between what is computed."""

GROUPS: tuple[tuple[str, tuple[Kind, ...]], ...] = (
    ("Compute", (Kind.GEMM, Kind.ATTENTION, Kind.MEMORY_BOUND)),
    ("Exposed communication", (Kind.COMMUNICATION, Kind.DATA_PARALLEL)),
    ("Bubble", (Kind.BUBBLE,)),
    ("Rest", (Kind.OPTIMIZER,)),
)
"""What readers of the chart ask for first."""

MEMORY: dict[MemoryPart, Ink] = {
    MemoryPart.PARAMETERS: Ink("parameters", "#4F46A5", meaning="what the rank holds of the weights"),
    MemoryPart.GRADIENTS: Ink("gradients", "#9C94E0"),
    MemoryPart.OPTIMIZER: Ink("optimizer state", "#CC79A7", meaning="master weights and both moments"),
    MemoryPart.ACTIVATIONS: Ink("activations", "#D8C25A", meaning="kept by the blocks for backward"),
    MemoryPart.ENDS: Ink("ends", "#87702A", meaning="kept by embedding, final norm and loss, with the logits"),
    MemoryPart.BUFFERS: Ink("buffers", "#A4505E", meaning="what a layer needs for as long as it runs"),
    MemoryPart.LIBRARIES: Ink("libraries", "#B5B5B5", "x", meaning="beside what the allocator counts"),
}
"""From what stays to what comes and goes; the optimizer has the colour that it has in time."""

_RAMP = ("#3D5A98", "#5E7C8C", "#7D8F7B", "#A3A56B", "#CDBD55", "#F5D83C")
"""From blue to yellow, as cividis: neighbours differ in lightness for every eye."""


def color_rank(rank: int, degree: int) -> str:
    """The colour of a rank among `degree` of them."""
    place = rank * (len(_RAMP) - 1) / max(1, degree - 1)
    first = min(int(place), len(_RAMP) - 2)
    low, high = (tuple(bytes.fromhex(color[1:])) for color in _RAMP[first : first + 2])
    mixed = (round(a + (b - a) * (place - first)) for a, b in zip(low, high, strict=True))
    return "#" + bytes(mixed).hex().upper()


def color_text_on(color: str) -> str:
    """Black or white, whichever is read more easily on `color`."""
    red, green, blue = (channel / 255 for channel in bytes.fromhex(color[1:]))
    return "#101010" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.18 else "#FFFFFF"
