"""Text to tokens, and tokens to text piece by piece: whole characters only, and nothing of a stop
string.

In vLLM and SGLang this is the tokenizer and the detokenizer, which is a process of its own in
SGLang.
"""

from __future__ import annotations

import re
from itertools import count
from typing import Any


class PromptReader:
    """Tokens of prompts; may be used by several threads. Special tokens in a caller's text are
    plain text: only the chat template writes them, so no text ends its own message."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(str(one) for one in added if one.special)}
        # here and not later: the option belongs to the tokenizer, which threads share
        self._plain = {one: self._encode(one, split_special_tokens=True) for one in special}
        self._encode("")
        found = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._special = re.compile(f"({found})" if found else "(?!)")

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Raises TemplateError or ValueError for messages that the template does not take."""
        form, text = (
            self._tokenizer.apply_chat_template,
            "".join(one["content"] for one in messages),
        )
        if not self._special.search(text):
            tokens: list[int] = form(messages, add_generation_prompt=True, return_dict=False)
            return tokens
        unused = (chr(one) for one in count(0xF0000) if chr(one) not in text)
        marks = dict(zip(self._plain, unused, strict=False))
        marked = [
            one | {"content": self._special.sub(lambda found: marks[found[0]], one["content"])}
            for one in messages
        ]
        whole = form(marked, add_generation_prompt=True, tokenize=False)
        plain = {mark: self._plain[special] for special, mark in marks.items()}
        pieces = re.split(f"([{''.join(plain)}])", whole)
        return [one for piece in pieces for one in plain.get(piece) or self._encode(piece)]

    def text(self, text: str) -> list[int]:
        first, *pieces = self._special.split(text)
        tokens: list[int] = self._tokenizer(first)["input_ids"]
        return tokens + [one for it in pieces for one in self._plain.get(it) or self._encode(it)]

    def _encode(self, text: str, **options: Any) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return tokens


class TextStream:
    """The text of an answer as it grows, cut before the first of `stop`."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._begin = self._whole = 0  # characters end at both; tokens before are not decoded again
        self._decoded = ""  # text of the tokens from _begin on that was taken
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain now."""
        self._tokens.append(token)
        text = self._decode()
        if text.endswith("\ufffd"):  # part of a character
            return ""
        new = text[len(self._decoded) :]
        self._begin, self._whole = self._whole, len(self._tokens)
        self._decoded = self._decode()
        return self._certain(new)

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        if self.stopped:
            return ""
        return self._certain(self._decode()[len(self._decoded) :]) + self._held

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._tokens[self._begin :], skip_special_tokens=True)
        return text

    def _certain(self, new: str) -> str:
        text = self._held + new
        found = [place for one in self._stop if (place := text.find(one)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        begun = [n for one in self._stop for n in range(1, len(one)) if text.endswith(one[:n])]
        keep = max(begun, default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
