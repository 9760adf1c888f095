"""PyTorch DTensor: ``parallelize_module`` with the stock parallel styles, gloo backend.

mode "tp": Colwise/Rowwise with replicated activations.
mode "sp": the same plus SequenceParallel norms and PrepareModuleInput (torchtitan's layout).
The head uses RowwiseParallel embedding, ColwiseParallel LM head and ``loss_parallel``.
"""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from harness.torch_reference import build_reference, init_gloo, named_weights, tensor
from harness.torch_steps import make_step
from harness.workitem import WorkItem


def setup(rank: int, world: int, item: WorkItem, *, mode: str = "tp", compile: bool = False):
    init_gloo(rank, world)
    mesh = init_device_mesh("cpu", (world,))
    model = build_reference(item)
    sequence = mode == "sp"
    seq = Shard(1)

    if item.kind == "block":
        plan = {
            "attn.wq": ColwiseParallel(),
            "attn.wk": ColwiseParallel(),
            "attn.wv": ColwiseParallel(),
            "attn.wo": RowwiseParallel(output_layouts=seq if sequence else Replicate()),
            "mlp.w_gate": ColwiseParallel(),
            "mlp.w_up": ColwiseParallel(),
            "mlp.w_down": RowwiseParallel(output_layouts=seq if sequence else Replicate()),
        }
        if sequence:
            whole = dict(input_layouts=(seq,), desired_input_layouts=(Replicate(),))
            plan |= {
                "attn_norm": SequenceParallel(use_local_output=True),
                "attn": PrepareModuleInput(**whole),
                "mlp_norm": SequenceParallel(use_local_output=True),
                "mlp": PrepareModuleInput(**whole),
            }
        parallelize_module(model, mesh, plan)
        place = [seq] if sequence else [Replicate()]
        x = distribute_tensor(tensor(item.x(), item), mesh, place).to_local().requires_grad_()
        dy = distribute_tensor(tensor(item.dy(), item), mesh, place).to_local()
        copies = {} if sequence else dict(loss=world, x=world, attn_norm=world, mlp_norm=world)
        forward = torch.compile(model) if compile else model
        return make_step(item, forward, (x,), named_weights(model), dy=dy, copies=copies)

    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=seq if sequence else Replicate()),
        "lm_head": ColwiseParallel(
            input_layouts=seq if sequence else Replicate(),
            output_layouts=Shard(-1),
            use_local_output=False,
        ),
    }
    parallelize_module(model, mesh, plan)
    step_, fingerprint = make_step(
        item,
        lambda tokens, targets: F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()),
        (torch.from_numpy(item.tokens()), torch.from_numpy(item.targets())),
        named_weights(model),
    )

    def step():
        with loss_parallel():  # covers forward and backward
            step_()

    return step, fingerprint
