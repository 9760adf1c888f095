"""Compares the messages that a rank moved with those of its schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

from plait.schedule.step import Message, Program


@dataclass(frozen=True)
class MessageDifference:
    """The first place where what a rank moved leaves its schedule; a side that had ended already is None.

    Attributes:
        direction: sent or received.
        index: position among the messages of that direction.
    """

    rank: int
    direction: str
    index: int
    promised: Message | None
    moved: Message | None

    def __str__(self) -> str:
        promised, moved = (
            "nothing" if message is None else f"{message} in round {message.round}"
            for message in (self.promised, self.moved)
        )
        return f"rank {self.rank} {self.direction} {moved} as message {self.index}, where its schedule has {promised}"


def find_message_difference(program: Program, moved: Sequence[Message]) -> MessageDifference | None:
    """The first difference between a schedule and the messages that were moved, or None.

    Those sent have to be in the order of sending, those received in the order of waiting; how the two are mingled is
    left to the transport.
    """
    for direction, promised in (("sent", program.messages_sent), ("received", program.messages_received)):
        found = [message for message in moved if (message.source == program.rank) == (direction == "sent")]
        for index in range(max(len(promised), len(found))):
            promise = promised[index] if index < len(promised) else None
            message = found[index] if index < len(found) else None
            if promise != message:
                return MessageDifference(program.rank, direction, index, promise, message)
    return None
