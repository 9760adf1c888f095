"""Agreement on what sees what, before anything moves: ranks with other documents would wait for each other for ever.

The usual mistake is to give each rank of a context axis a batch of its own, where all have to have the same one.
"""

from collections import defaultdict
from hashlib import blake2b
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from plait.comm import collectives, trace
from plait.comm.agree import share_over
from plait.comm.mesh import Axis
from plait.errors import ShardingError
from plait.parallel.context.context import Site
from plait.sharding import build_split

_DIGEST_BYTES = 16

_MAX_AGREED = 1 << 10
"""Each batch of documents is a new one."""

_agreed: "WeakKeyDictionary[Axis, set[object]]" = WeakKeyDictionary()


def check_same_attention(site: Site, q: Tensor, k: Tensor) -> None:
    """Compare the attention that is about to run with the other ranks of its axis, once for each that there is.

    Every rank has to call it, which is why the answer is remembered by what all of them know alike. It is one small
    collective, in no trace: a contract promises what attention moves.

    Raises:
        ShardingError: ranks differ; on all of them.
    """
    axis, plan = site.axis, site.plan
    if axis.group is None:
        return
    agreed = _agreed.setdefault(axis, set())
    sizes = (plan.batch, q.shape[1], k.shape[1], q.shape[3])
    attention = (site.context.method, plan, sizes, q.dtype, site.sum_dtype, site.scale)
    if attention in agreed:
        return
    digest = blake2b(repr(attention).encode(), digest_size=_DIGEST_BYTES).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(q.device)
    with trace.aside():
        split = build_split(axis.degree * _DIGEST_BYTES, axis.degree)
        digests = collectives.all_gather(own, axis, split, label="attention").view(axis.degree, -1)
        if not torch.equal(digests, own.expand_as(digests)):
            raise _build_error(share_over(_describe(site, q, k), axis, q.device), axis)
    if len(agreed) >= _MAX_AGREED:
        agreed.clear()  # on all ranks at once, as all of them agree on the same in the same order
    agreed.add(attention)


def _describe(site: Site, q: Tensor, k: Tensor) -> str:
    mask, order = site.plan.mask, site.plan.order
    rows = ["+".join(str(len(document)) for document in row) or "padding" for row in mask.documents[:4]]
    documents = f", documents {'; '.join(rows)}{'; ...' if len(mask.documents) > 4 else ''}" if rows else ""
    seen = f"{'causal' if mask.causal else 'full'}{'' if mask.window is None else f', window {mask.window}'}{documents}"
    chunks = " | ".join(", ".join(map(str, own)) for own in order.chunks)
    return f"{site.context.method} of {order.size} tokens dealt as {chunks}; {_describe_sizes(site, q, k)}; {seen}"


def _describe_sizes(site: Site, q: Tensor, k: Tensor) -> str:
    dtype = str(q.dtype).removeprefix("torch.")
    sums = str(site.sum_dtype).removeprefix("torch.")
    return f"batch {q.shape[0]}, {q.shape[1]} heads over {k.shape[1]}, width {q.shape[3]}, {dtype}, sums in {sums}"


def _build_error(said: list[str], axis: Axis) -> ShardingError:
    by_text: defaultdict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(said):
        by_text[text].append(rank)
    listed = "".join(
        f"\n  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in by_text.items()
    )
    return ShardingError(
        f"the ranks of axis {axis.name!r} would not run one attention:{listed}",
        hint="all ranks of a context axis take the same batch, and their own tokens of it: tokens.take_own",
    )
