"""What one pass has begun to gather for the next: the gather of x for the backward of a column group fills the link
while the backward of the row linear behind it still computes.

Nothing depends on the next pass coming: whatever comes instead first lets arrive what is on its way, and drops it.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from plait.overlap.execute import Addends
from plait.overlap.site import Pass
from plait.overlap.transport.piecewise import PiecewiseGather
from plait.overlap.transport.ring import RingTransport
from plait.schedule.step import Program, Wait


@dataclass(frozen=True)
class Next:
    """The pass that will follow another.

    Attributes:
        shard: what it gathers.
        addends: what it reduces.
    """

    what: Pass
    shard: Tensor
    addends: Addends


@dataclass(frozen=True)
class Begun:
    """A gather on its way.

    Attributes:
        what: the pass that is to come.
        following: the very run of it, by identity.
        program: of that pass, which waits for the messages.
        in_vain: passes for which something was begun that they did not come for; they are not begun for again.
    """

    what: Pass
    following: Next
    session: PiecewiseGather
    transport: RingTransport
    program: Program
    in_vain: set[Pass]

    def drain(self) -> None:
        """Let arrive what is on its way, for nobody."""
        self.in_vain.add(self.what)
        self.session.note()
        try:
            for step in self.program.steps:
                if isinstance(step, Wait) and step.message.tensor == self.session.flow.tensor:
                    self.session.wait(step.message)
            self.session.flush()
        finally:
            self.transport.end_ahead()


_on_the_way: "WeakKeyDictionary[dist.ProcessGroup, Begun]" = WeakKeyDictionary()
"""By group, for all models that talk over it: their messages must not meet."""


def put_begun(group: dist.ProcessGroup, begun: Begun) -> None:
    """Leave a gather to the next pass over `group`."""
    _on_the_way[group] = begun


def take_begun(group: dist.ProcessGroup | None, this: Next | None) -> Begun | None:
    """What the pass before has begun for `this` one; anything else that it has begun is drained."""
    begun = _on_the_way.pop(group, None) if _on_the_way and group is not None else None
    if begun is None or begun.following is this:
        return begun
    begun.drain()
    return None
