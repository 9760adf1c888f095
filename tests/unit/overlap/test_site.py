"""Passes as keys: equal ones hash alike, also after a journey to another process."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

from plait.overlap.site import Pass, Site
from plait.schedule.work import Operation
from plait.sharding import Replicate, Shard, derive_transition

PASS = Pass(
    Operation.COLUMN_FORWARD, Site("wq", "attention", 64, 32, "float32"), derive_transition(Shard(0), Replicate()), 8
)


def test_equal_passes_are_one_key_and_others_are_not() -> None:
    again = replace(PASS, num_rows=9)
    assert again != PASS
    assert {PASS: "here"}.get(replace(again, num_rows=8)) == "here"
    assert len({hash(PASS), hash(again), hash(replace(PASS, needs_dgrad=False)), hash(replace(PASS, unit=2))}) == 4


def test_a_pass_of_another_process_is_still_the_same_key() -> None:
    code = "import pickle, sys; each = pickle.load(sys.stdin.buffer); sys.exit(hash(each) != hash(tuple(each._given)))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    sent = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(PASS), env=environment, check=False)
    assert sent.returncode == 0
