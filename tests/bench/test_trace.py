"""Traces that cannot be replayed end the program with a message."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cases.trace import trace_of

NO_PROMPT = '{"timestamp": 1, "hash_ids": [], "input_length": 1, "output_length": 1}\n'
ONE = '{"timestamp": 1, "hash_ids": [7, 8], "input_length": 600, "output_length": 0}\n\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests with prompts"),
        (NO_PROMPT, "has no requests with prompts"),
        ("nonsense\n", "is no trace"),
        ('{"timestamp": 1}\n', "is no trace: KeyError"),
        ("[1]\n", "is no trace"),
        (None, "is no trace: FileNotFoundError"),
    ],
)
def test_a_file_without_requests_is_a_message(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=message):
        trace_of(path, 10)


def test_a_trace_is_read_or_generated(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(ONE, encoding="utf-8")
    (request,) = trace_of(path, 10)
    assert (request.blocks, request.tokens, request.output) == ((7, 8), 600, 1)
    assert len(trace_of(None, 10)) == 10
