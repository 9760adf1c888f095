"""No parallelism: the reference modules in one process (OMP_NUM_THREADS says how many threads).

The numbers every other peer is checked against and compared with.
"""

import torch
import torch.nn.functional as F

from harness.torch_reference import build_reference, named_weights, tensor
from harness.torch_steps import make_step
from harness.workitem import WorkItem


def setup(rank: int, world: int, item: WorkItem, *, compile: bool = False):
    model = build_reference(item)
    if item.kind == "block":
        x = tensor(item.x(), item, requires_grad=True)
        forward = torch.compile(model) if compile else model
        return make_step(item, forward, (x,), named_weights(model), dy=tensor(item.dy(), item))

    def loss(tokens, targets):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    forward = torch.compile(loss) if compile else loss
    inputs = (torch.from_numpy(item.tokens()), torch.from_numpy(item.targets()))
    return make_step(item, forward, inputs, named_weights(model))
