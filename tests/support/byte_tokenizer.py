"""A tokenizer whose tokens are bytes, and an end-of-text token: small, and known without training."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 257


def build_byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are byte-level characters in sorted order, 256 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def save_byte_tokenizer(folder: Path) -> Path:
    """Write it to `folder`."""
    path = folder / "tokenizer.json"
    build_byte_tokenizer().save(str(path))
    return path
