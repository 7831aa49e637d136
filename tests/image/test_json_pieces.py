"""Long JSON read in pieces: the same values and refusals as at once, and no piece is long."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from service.errors import MalformedBody
from service.image import json_text
from service.image.json_text import OBJECT_BYTES, finish, is_short, load_json, loading, weight_of

LONG: dict[str, Any] = {
    "numbers": {"layer": 0, "token_ids": list(range(100_000))},
    "floats": [0.25, -1e-9, 1e30] * 20_000,
    "strings": {"sequences": [f"chat-{n}" for n in range(60_000)]},
    "commas and brackets in strings": {
        "sequences": ["a,]}[{", 'x"y', "\\", "ä"] * 250 + ["x"] * 9000
    },
    "objects": {"sequences": [{"id": f"s{n}", "parent": None} for n in range(20_000)]},
    "empty objects": {"sequences": [{}] * 40_000},
    "objects of lists": {"sequences": [{"prefix": {"token_ids": [1, 2]}, "x": {}}] * 900},
    "one large list in an object": {"sequences": [{"x": {}, "ids": list(range(60_000))}]},
    "nothing in lists": {"a": [], "b": [[]], "c": [1] * 9000, "d": {}},
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("indent", [None, 1])
def test_long_text_gives_the_values_that_it_gives_at_once(name: str, indent: int | None) -> None:
    text = json.dumps(LONG[name], indent=indent).encode()
    assert not is_short(text) or name in ("objects of lists", "nothing in lists")
    assert finish(loading(text, "it")) == load_json(text, "it")


def test_a_long_list_comes_in_many_pieces() -> None:
    text = json.dumps(LONG["numbers"]).encode()
    assert sum(1 for _ in loading(text, "it")) > 20


@pytest.mark.parametrize(
    "ending",
    [",", ",]", "]]", "}", " 1", ',"', "NaN]", ",1 2]", ",{]", ",\x00]", ",[1,]]", '"a":1]', "]x"],
)
def test_invalid_json_is_refused_with_the_same_error(ending: str) -> None:
    text = ("[" + ",".join(map(str, range(20_000))) + ending).encode()
    with pytest.raises(MalformedBody):
        load_json(text, "it")
    with pytest.raises(MalformedBody):
        finish(loading(text, "it"))


def test_a_duplicate_key_and_too_many_keys_are_refused() -> None:
    rest = ",".join(["1"] * 9000)
    for text in (
        f'{{"a":1,"b":[{rest}],"a":2}}',
        json.dumps({str(n): [1] * 90 for n in range(200)}),
    ):
        with pytest.raises(MalformedBody):
            finish(loading(text.encode(), "it"))


def test_random_edits_of_long_text_are_taken_or_refused_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_text, "SHORT_VALUES", 0)
    monkeypatch.setattr(json_text, "WINDOW", 12)
    rng = random.Random(7)
    whole = json.dumps({"a": [1, 2.5, "x,]"], "b": [{"c": [{}, '\\"']}, {"d": 1}, {}], "e": "é"})
    for _ in range(3000):
        at = rng.randrange(len(whole))
        put = rng.choice(['"', ",", "[", "]", "{", "}", ":", " ", "1", "\\", ""])
        text = (whole[:at] + put + whole[at + rng.randrange(2) :]).encode()
        try:
            wanted = load_json(text, "it")
        except MalformedBody:
            with pytest.raises(MalformedBody):
                finish(loading(text, "it"))
        else:
            assert finish(loading(text, "it")) == wanted


def test_objects_are_counted_however_they_are_spelled() -> None:
    plain, escaped = b"{},", rb"\u007b\u007d\u002c"
    for one in (plain, escaped):
        assert weight_of(one * 100) >= 100 * OBJECT_BYTES
