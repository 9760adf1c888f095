"""A limit on how long files may be, as small file systems set it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """Let the system refuse this process longer files, as a full /dev/shm would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
