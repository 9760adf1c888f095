"""A save that goes on while training does: a copy on the CPU, and a thread that writes it.

No rank waits for another in its thread: collectives of two threads would have no order. Each leaves a note in the
folder when it has written its file, and the first rank gives the folder its name when it has found all notes.
"""

import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.part import Tensors
from plait.checkpoint.save import Save
from plait.comm.agree import together
from plait.comm.mesh import Mesh
from plait.errors import CheckpointError, PlaitError

_POLL_S = 0.01


class Staging:
    """Memory on the CPU that holds what this rank writes of a checkpoint while training changes the original."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """How much there is."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @torch.no_grad()
    def copy(self, tensors: Tensors) -> Tensors:
        """Copy what this rank writes; the memory is that of the copy before."""
        written = {name: owned for name, owned in tensors.items() if owned.is_written}
        is_accelerated = False
        for name, owned in written.items():
            is_accelerated |= owned.tensor.device.type != "cpu"
            if name not in self._buffers:
                self._buffers[name] = torch.empty(
                    owned.tensor.shape, dtype=owned.tensor.dtype, pin_memory=owned.tensor.is_cuda
                )
            self._buffers[name].copy_(owned.tensor, non_blocking=True)
        if is_accelerated:
            torch.accelerator.synchronize()
        return {name: replace(owned, tensor=self._buffers[name]) for name, owned in written.items()}


class BackgroundSave:
    """A checkpoint that a thread writes; every rank of the mesh has one."""

    def __init__(self, save: Save, tensors: Tensors, mesh: Mesh) -> None:
        """Begin to write what `tensors` hold, which nobody may change before the save is over.

        Raises:
            CheckpointError: on every rank, if the folder cannot be made, or is there already.
        """
        try:
            with together(mesh):
                if mesh.rank == 0:
                    save.begin()
        except BaseException:  # a rank that is lost by now has left nothing that could be abandoned
            if mesh.rank == 0:
                save.discard()
            raise
        self._save, self._tensors, self._mesh = save, tensors, mesh
        self._error: PlaitError | None = None
        self._is_wanted = True
        self._has_written = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"save of step {save.step}", daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows already that there will be no checkpoint."""
        return self._error is not None

    def finish(self) -> Path:
        """Wait until all ranks have written, and return the folder; all ranks call it at the same point.

        Raises:
            CheckpointError: on every rank, if any of them could not write.
        """
        self._has_written.wait()
        try:
            with together(self._mesh):
                self._raise_error()
            with together(self._mesh):
                self._thread.join()
                self._raise_error()
        except BaseException:
            self.abandon()
            raise
        return self._save.final

    def end(self, timeout_s: float) -> None:
        """Let the save come to its end, if it does within this time, without asking other ranks; errors are dropped."""
        self._thread.join(timeout_s)
        if self._thread.is_alive() or self._error is not None:
            self.abandon()

    def abandon(self) -> None:
        """Leave everything as if the save had never begun."""
        self._is_wanted = False
        self._thread.join()
        if self._mesh.rank == 0:
            self._save.discard()

    def _run(self) -> None:
        try:
            self._save.write(self._tensors, self._mesh.rank, lambda: self._is_wanted)
            self._has_written.set()
            if self._mesh.rank == 0 and self._find_all_notes():
                self._save.publish(self._mesh.shape.world_size)
        except PlaitError as error:
            self._error = error
        except Exception as error:  # whatever it is has to be known on the thread that trains
            self._error = CheckpointError(f"{self._save.final}: cannot be written ({type(error).__name__}: {error})")
        finally:
            self._has_written.set()

    def _find_all_notes(self) -> bool:
        """Wait for them; false where the save is not wanted any more."""
        left = set(range(self._mesh.shape.world_size))
        while self._is_wanted and left:
            left -= {rank for rank in left if self._save.has_note(rank)}
            if left:
                time.sleep(_POLL_S)
        return not left

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
