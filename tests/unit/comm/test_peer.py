import os
import subprocess
import sys
from dataclasses import replace

from plait.comm.shared.peer import Peer

WAIT = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"


def test_a_process_is_gone_when_it_has_ended_even_if_nobody_has_asked_how() -> None:
    with subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        peer = Peer.of(process.pid)
        assert not peer.is_gone()
        process.kill()
        while not peer.is_gone():
            assert process.returncode is None
    assert process.returncode is not None
    assert peer.is_gone()


def test_another_process_with_its_id_is_not_the_process() -> None:
    assert replace(Peer.of(os.getpid()), started="1").is_gone()


def test_of_another_namespace_nothing_is_known() -> None:
    assert not replace(Peer.of(os.getpid()), started="1", namespace=1).is_gone()
