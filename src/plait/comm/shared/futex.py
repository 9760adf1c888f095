"""The futex of Linux: sleep until a number in shared memory changes, and wake those who sleep. No compiled code."""

import ctypes
import platform
import sys
from typing import Any

SLEEP_S = 0.2
"""The longest sleep, so that whoever waits looks again whether the others are still there."""

_SYSCALL = 202
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_limit = (ctypes.c_long * 2)(0, int(SLEEP_S * 1e9))
_LIMIT = ctypes.addressof(_limit)
# A CDLL gives up the GIL during the call, so that other threads of a rank that sleeps go on.
_syscall: Any = getattr(_libc, "syscall", None)
if _syscall is not None:
    _syscall.restype = ctypes.c_long
    _syscall.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )


def describe_lack() -> str | None:
    """Why processes cannot signal each other through memory on this machine; None if they can.

    Python has no store that others see only after everything stored before. On x86 every store is like that.
    """
    machine = platform.machine()
    if _syscall is None:
        return f"it takes the futex of Linux, and this is {platform.system()}"
    if machine != "x86_64":
        return f"it takes stores that become visible in order, as on x86_64, and this is {machine}"
    return None


def sleep(address: int, seen: int) -> None:
    """Sleep while the word at `address` has the low bits `seen`; until woken, or at most `SLEEP_S`."""
    _syscall(_SYSCALL, address, _WAIT, seen & 0xFFFFFFFF, _LIMIT, None, 0)


def wake(address: int) -> None:
    """Wake all who sleep at `address`."""
    _syscall(_SYSCALL, address, _WAKE, _ALL, None, None, 0)
