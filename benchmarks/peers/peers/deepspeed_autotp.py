"""DeepSpeed AutoTP training: ``deepspeed.initialize`` with a ``tensor_parallel`` config.

The reference modules are partitioned by DeepSpeed from layer patterns; the forward and backward
then run on the engine's module.  The head uses DeepSpeed's VocabParallelEmbedding,
VocabParallelLinear and vocab_parallel_cross_entropy.  Runs on gloo with DS_ACCELERATOR=cpu.
"""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.module_inject.layers import (  # noqa: E402
    VocabParallelEmbedding,
    VocabParallelLinear,
    set_autotp_mode,
)

from harness.torch_reference import DTYPES, build_reference, named_weights, tensor  # noqa: E402
from harness.torch_steps import make_step  # noqa: E402
from harness.workitem import WorkItem  # noqa: E402


def setup(rank: int, world: int, item: WorkItem, *, overlap: bool = False):
    deepspeed.init_distributed("gloo", verbose=False)
    reference = build_reference(item)
    if item.kind == "block":
        specs = [
            dict(patterns=[r".*attn\.w[qkv]\.weight$", r".*mlp\.w_(gate|up)\.weight$"], partition_type="column"),
            dict(patterns=[r".*attn\.wo\.weight$", r".*mlp\.w_down\.weight$"], partition_type="row"),
        ]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 0},
            "bf16": {"enabled": item.dtype == "bfloat16"},
            "zero_allow_untested_optimizer": True,
            "tensor_parallel": {
                "autotp_size": world,
                "tp_overlap_comm": overlap,
                "partition_config": {"use_default_specs": False, "layer_specs": specs},
            },
        }
        engine, *_ = deepspeed.initialize(
            model=reference, optimizer=torch.optim.SGD(reference.parameters(), lr=0.0), config=config
        )
        model = engine.module
        copies = {"loss": world, "x": world, "attn_norm": world, "mlp_norm": world}
        return make_step(
            item,
            model,
            (tensor(item.x(), item, True),),
            named_weights(model),
            dy=tensor(item.dy(), item),
            copies=copies,
        )

    from deepspeed.sequence import vocab_parallel_cross_entropy

    set_autotp_mode(training=True)
    group = torch.distributed.group.WORLD
    embedding = VocabParallelEmbedding(reference.embedding, group, name="embedding")
    lm_head = VocabParallelLinear(reference.lm_head, group, name="lm_head")

    def loss(tokens, targets):
        return vocab_parallel_cross_entropy(
            lm_head(embedding(tokens)),
            targets,
            tp_group=group,
            vocab_start_index=lm_head.vocab_start_index,
            vocab_end_index=lm_head.vocab_end_index,
            global_vocab_size=lm_head.vocab_size,
        )

    inputs = (torch.from_numpy(item.tokens()), torch.from_numpy(item.targets()))
    weights = {"embedding": embedding.weight, "lm_head": lm_head.weight}
    return make_step(item, loss, inputs, weights, copies={"loss": world})
