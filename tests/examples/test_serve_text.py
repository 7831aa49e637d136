"""Tokens to text in examples/serve, with tokens that are parts of characters."""

from __future__ import annotations

import random
from typing import Any

import pytest

from examples.serve.text import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes; it decoded `most` tokens at once."""

    def __init__(self) -> None:
        self.most = 0

    def decode(self, tokens: list[int], **_: Any) -> str:
        self.most = max(self.most, len(tokens))
        return bytes(tokens).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["一二三四五" * 40, "a" * 200, "é a😀\n" * 40])
def test_a_text_is_decoded_a_few_tokens_at_a_time(text: str) -> None:
    tokenizer = Bytes()
    stream = TextStream(tokenizer, ())
    pieces = [stream.push(token) for token in text.encode()]
    assert "".join(pieces) + stream.finish() == text
    assert "\ufffd" not in "".join(pieces)
    assert tokenizer.most < 8


def test_a_text_is_cut_before_the_first_stop_string_wherever_tokens_end() -> None:
    rng = random.Random(3)
    for _ in range(300):
        text = "".join(rng.choices("ab好 ", k=30))
        stops = tuple("".join(rng.choices("ab好 ", k=rng.randint(1, 4))) for _ in range(2))
        stream, made = TextStream(Bytes(), stops), ""
        for token in text.encode():
            made += stream.push(token)
            if stream.stopped:
                break
        ends = [text.find(stop) for stop in stops if stop in text]
        assert made + stream.finish() == text[: min(ends, default=len(text))]
