"""Ranks that fail on purpose: at one point of a training run, once.

`plan_fault` writes down what is to happen, and `train_badly`, which ranks run in place of `train_rank`, does it. It
removes the plan first, so that ranks that are started again do not fail again.
"""

import json
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from plait.cli.train import train_rank
from plait.comm import trace
from plait.config.run import RunConfig
from plait.train import loop, step
from plait.train.loop import Summary

PAUSE_S = 0.12


def plan_fault(folder: Path, where: str, what: str, *, rank: int = 1, at_step: int = 3) -> None:
    """Let `rank` do `what` at the point `where` of step `at_step`, counted from 0."""
    plan = {"where": where, "what": what, "rank": rank, "at_step": at_step}
    _plan_path(str(folder)).write_text(json.dumps(plan))


def train_badly(run: RunConfig) -> Summary:
    """Train as `train_rank` does, but for what is planned."""
    path = _plan_path(run.out_dir)
    if not path.exists():
        return train_rank(run)
    plan = json.loads(path.read_text())
    dist.barrier()  # all have read it
    if plan["rank"] != dist.get_rank():
        return train_rank(run)
    if plan["where"] == "start":
        _act(plan, path)
    with ExitStack() as stack:
        stack.enter_context(_armed(plan, path))
        return train_rank(run)


def _plan_path(out_dir: str) -> Path:
    return Path(out_dir) / "fault.json"


@contextmanager
def _armed(plan: dict[str, Any], path: Path) -> Iterator[None]:
    """Act when the point is come to after the step has begun."""
    derive = loop.derive_learning_rate
    has_begun = False

    def begin(number: int, config: Any) -> float:
        nonlocal has_begun
        has_begun = number >= plan["at_step"]
        if plan["where"] == "step" and has_begun:
            _act(plan, path)
        return derive(number, config)

    def at(act: Callable[..., Any]) -> Callable[..., Any]:
        def act_or_fail(*args: Any, **kwargs: Any) -> Any:
            if has_begun:
                _act(plan, path)
            result = act(*args, **kwargs)
            return result * math.nan if has_begun and plan["what"] == "nan" else result

        return act_or_fail

    points: dict[str, tuple[Any, str]] = {
        "gemm": (trace, "note_sent"),  # a message of a schedule has set off
        "loss": (step, "vocab_parallel_cross_entropy"),
        "save": (os, "fsync"),  # files are written, and not complete yet
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(loop, "derive_learning_rate", begin))
        if plan["where"] in points:
            owner, name = points[plan["where"]]
            stack.enter_context(patch.object(owner, name, at(getattr(owner, name))))
        yield


def _act(plan: dict[str, Any], path: Path) -> None:
    if plan["what"] == "pause":
        time.sleep(PAUSE_S)  # again and again
        return
    path.unlink(missing_ok=True)
    match plan["what"]:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "limit files":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        case "fill disk":
            _fill(path.parent)


def _fill(folder: Path) -> None:
    """Take all that is left of a disk."""
    with (folder / "filler").open("wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
