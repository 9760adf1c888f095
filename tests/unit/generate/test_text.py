"""Text as it comes equals the text of all tokens, never breaks a character, and ends where a stop text begins."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from plait.generate.text import TextStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def decode_bytes(tokens: Sequence[int]) -> str:
    """A byte is a token."""
    return bytes(tokens).decode("utf-8", errors="replace")


WORDS = ["cat", "dog", "do", "g"]


def decode_words(tokens: Sequence[int]) -> str:
    """As sentencepiece does: a word has a blank before it, except at the beginning of a text."""
    return "".join(f" {WORDS[token]}" for token in tokens).removeprefix(" ")


def stream(texts: TextStream, tokens: Sequence[int]) -> list[str]:
    """What came with each token, and at the end."""
    parts: list[str] = []
    for token in tokens:
        parts.append(texts.push(token))
        if texts.is_stopped:
            return parts
    return [*parts, texts.finish()]


@given(st.text(max_size=40))
def test_what_comes_adds_up_to_the_whole_text(text: str) -> None:
    parts = stream(TextStream(decode_bytes), list(text.encode()))
    assert "".join(parts) == text
    assert all(REPLACEMENT not in part for part in parts) or REPLACEMENT in text


@given(st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_do_not_hold_back_the_rest(tokens: list[int]) -> None:
    whole = decode_bytes(tokens)
    parts = "".join(stream(TextStream(decode_bytes), tokens))
    assert parts.replace(REPLACEMENT, "") == whole.replace(REPLACEMENT, "")


def test_a_character_comes_whole_with_its_last_byte() -> None:
    face = "\N{GRINNING FACE}"
    assert stream(TextStream(decode_bytes), list(f"a{face}b".encode())) == ["a", "", "", "", face, "b", ""]


def test_an_unfinished_character_comes_as_it_is_at_the_end() -> None:
    tokens = list("\N{EURO SIGN}".encode())[:2]
    assert stream(TextStream(decode_bytes), [97, *tokens]) == ["a", "", "", REPLACEMENT]


def test_blanks_between_words_are_those_of_the_whole_text() -> None:
    assert stream(TextStream(decode_words), [0, 1, 0]) == ["cat", " dog", " cat", ""]


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_the_stop_text_that_is_complete_first(text: str, stop: list[str]) -> None:
    ends = [place + len(each) for each in stop if (place := text.find(each)) >= 0]
    texts = TextStream(decode_bytes, stop)
    parts = "".join(stream(texts, list(text.encode())))
    if not ends:
        assert (parts, texts.is_stopped) == (text, False)
        return
    seen = text[: min(ends)]
    places = [seen.find(each) for each in stop if each in seen]
    assert (parts, texts.is_stopped) == (seen[: min(places)], True)


def test_a_stop_text_is_found_across_tokens_and_within_one() -> None:
    assert stream(TextStream(decode_words, ["t do"]), [0, 2]) == ["ca", ""]
    assert stream(TextStream(decode_words, ["a"]), [1, 0]) == ["dog", " c"]


def test_what_looked_like_a_stop_text_comes_when_it_is_none() -> None:
    assert stream(TextStream(decode_words, ["cat!"]), [0, 1]) == ["", "cat dog", ""]
    assert stream(TextStream(decode_words, ["cat!"]), [0]) == ["", "cat"]
