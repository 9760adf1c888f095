"""What one pass has begun to gather for the next: the gather of x for the backward of a column group fills the link
while the backward of the row linear behind it still computes.

Nothing depends on the next pass coming: whatever comes instead first lets arrive what is on its way, and drops it.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from plait.overlap.transport.piecewise import PiecewiseGather
from plait.overlap.transport.ring import RingTransport
from plait.schedule.step import Program, Wait


@dataclass(frozen=True)
class Begun:
    """A gather on its way.

    Attributes:
        what: the pass that is to come.
        shard: the own rows that were sent.
        program: of that pass, which waits for the messages.
    """

    what: object
    shard: Tensor
    session: PiecewiseGather
    transport: RingTransport
    program: Program

    def is_for(self, what: object, shard: Tensor | None) -> bool:
        """Whether a pass with this shard is the one that it was begun for."""
        return what == self.what and shard is not None and shard.data_ptr() == self.shard.data_ptr()

    def drain(self) -> None:
        """Let arrive what is on its way."""
        for step in self.program.steps:
            if isinstance(step, Wait) and step.message.tensor == self.session.flow.tensor:
                self.session.wait(step.message)
        self.session.flush()
        self.transport.end_ahead()


_on_the_way: "WeakKeyDictionary[dist.ProcessGroup, Begun]" = WeakKeyDictionary()
"""By group, for all models that talk over it: their messages must not meet."""


def put_begun(group: dist.ProcessGroup, begun: Begun) -> None:
    """Leave a gather to the next pass over `group`."""
    _on_the_way[group] = begun


def take_begun(group: dist.ProcessGroup | None, what: object, shard: Tensor | None) -> Begun | None:
    """What the pass before has begun for this one; anything else that it has begun is drained."""
    begun = None if group is None else _on_the_way.pop(group, None)
    if begun is None or begun.is_for(what, shard):
        return begun
    begun.drain()
    return None
