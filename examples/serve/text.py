"""Tokens to text, piece by piece: whole characters only, and nothing of a stop string.

In vLLM and SGLang this is the detokenizer; in SGLang it is a process of its own.
"""

from __future__ import annotations

from typing import Any


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
