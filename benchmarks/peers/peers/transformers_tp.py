"""Hugging Face transformers: ``from_pretrained(..., tp_plan="auto")`` on a random Llama.

The model is written to a temporary folder and loaded back, as a user would.  The block is the
model's only decoder layer, called with an identity rotary embedding (cos 1, sin 0) so that its
result can be checked; the head is a model with no decoder layers.  The stock Llama plan
replicates the embedding and gathers the logits, so the cross entropy runs on whole logits on
every rank.  mode "eager_repeat_kv"-style work inside HF's attention is the library's own choice.
"""

import os
import shutil
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from harness.torch_reference import DTYPES, init_gloo, tensor
from harness.torch_steps import make_step
from harness.workitem import EPS, WorkItem

HF_NAMES = {
    "attn_norm": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "w_gate": "mlp.gate_proj",
    "w_up": "mlp.up_proj",
    "w_down": "mlp.down_proj",
}


def save_model(item: WorkItem, folder: str) -> None:
    block = item.kind == "block"
    config = LlamaConfig(
        hidden_size=item.hidden,
        intermediate_size=item.ffn,
        num_attention_heads=item.heads,
        num_key_value_heads=item.kv_heads,
        num_hidden_layers=1 if block else 0,
        vocab_size=128 if block else item.vocab,
        rms_norm_eps=EPS,
        tie_word_embeddings=False,
        max_position_embeddings=item.seq,
    )
    model = LlamaForCausalLM(config).to(DTYPES[item.dtype])
    with torch.no_grad():
        if block:
            for name, path in HF_NAMES.items():
                w = torch.from_numpy(item.weight(name))
                model.model.layers[0].get_submodule(path).weight.copy_(w)
        else:
            model.model.embed_tokens.weight.copy_(torch.from_numpy(item.weight("embedding")))
            model.lm_head.weight.copy_(torch.from_numpy(item.weight("lm_head")))
    model.save_pretrained(folder)


def setup(rank: int, world: int, item: WorkItem):
    init_gloo(rank, world)
    folder = os.path.join(tempfile.gettempdir(), f"bench-llama-{os.environ['MASTER_PORT']}")
    if rank == 0:
        save_model(item, folder)
    torch.distributed.barrier()
    model = LlamaForCausalLM.from_pretrained(
        folder, tp_plan="auto", dtype=DTYPES[item.dtype], attn_implementation="sdpa"
    )
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    model.train()

    if item.kind == "block":
        layer = model.model.layers[0]
        shape = (1, item.seq, item.head_dim)
        rotary = (torch.ones(shape, dtype=model.dtype), torch.zeros(shape, dtype=model.dtype))

        def forward(x):
            out = layer(x, position_embeddings=rotary, attention_mask=None)
            return out[0] if isinstance(out, tuple) else out

        weights = {n: layer.get_submodule(path).weight for n, path in HF_NAMES.items()}
        copies = {"loss": world, "x": world, "attn_norm": world, "mlp_norm": world}
        return make_step(
            item, forward, (tensor(item.x(), item, True),), weights, dy=tensor(item.dy(), item), copies=copies
        )

    model.model.norm = nn.Identity()

    def loss(tokens, targets):
        logits = model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    weights = {"embedding": model.model.embed_tokens.weight, "lm_head": model.lm_head.weight}
    return make_step(
        item,
        loss,
        (torch.from_numpy(item.tokens()), torch.from_numpy(item.targets())),
        weights,
        copies={"loss": world, "embedding": world},
    )
