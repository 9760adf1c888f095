"""What a stage gives the next for a micro-batch."""

from plait.contract.setting import Setting


def derive_stream_shape(setting: Setting, width: int) -> tuple[int, int]:
    """Of the stream between two blocks, what the rank of `setting` has: own tokens, or all of them."""
    rows, features = setting.build_tensor("x", "D", width, setting.activation).layout.local_shape(setting.rank)
    return rows, features
