"""Every limit of docs/api.md that a request's header decides: one below, at it, and one above."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from declared import prepared, queries

from service.errors import InvalidRequest, MalformedBody

Request = tuple[str, dict[str, Any], dict[str, Any]]


def names(count: int) -> list[str]:
    return [f"s{number}" for number in range(count)]


def zeros(*shape: int, dtype: str = "u4") -> Any:
    return np.broadcast_to(np.zeros((), dtype), shape)


def levels(*counts: int) -> dict[str, Any]:
    every = [{"sequences": names(n), "qo_indptr": [0] * n + [1]} for n in counts]
    return {"layer": 0, "levels": every}


def extra(*firsts: int, size: int = 1) -> dict[str, Any]:
    return {
        "token_ids": [0] * 4096,
        "extra": [{"first_token": n, "key": "0c" * size} for n in firsts],
    }


LIMITS: Final[dict[str, tuple[int, str, Callable[[int], Request]]]] = {
    "sequences created": (
        1024,
        "sequences",
        lambda n: ("create_sequences", {"sequences": [{}] * n}, {}),
    ),
    "ids deleted": (1024, "ids", lambda n: ("delete_sequences", {"ids": names(n)}, {})),
    "sequences cut": (
        512,
        "sequences",
        lambda n: ("truncate_sequences", {"sequences": names(n), "lengths": [0] * n}, {}),
    ),
    "tokens kept by one": (
        16384,
        "keep",
        lambda n: ("truncate", {"id": "a", "length": 0, "keep": list(range(1, n + 1))}, {}),
    ),
    "sequences committed": (
        512,
        "sequences",
        lambda n: (
            "commit_sequences",
            {"sequences": names(n), "names_indptr": list(range(n + 1))},
            {"token_ids": zeros(n)},
        ),
    ),
    "token ids": (
        131072,
        "token_ids",
        lambda n: ("match_prefix", {}, {"token_ids": zeros(n)}),
    ),
    "page keys": (
        131072,
        "page_keys",
        lambda n: ("commit", {"id": "a"}, {"page_keys": zeros(n, 16, dtype="u1")}),
    ),
    "sequences of a decode": (
        4096,
        "sequences",
        lambda n: ("decode", {"layer": 0, "sequences": names(n)}, {"q": queries(n)}),
    ),
    "sequences of a gather": (
        4096,
        "sequences",
        lambda n: ("gather", {"layer": 0, "sequences": names(n)}, {}),
    ),
    "sequences of all levels": (
        4096,
        "levels",
        lambda n: ("cascade", levels(n // 2, n - n // 2), {"q": queries(1)}),
    ),
    "levels": (16, "levels", lambda n: ("cascade", levels(*[1] * n), {"q": queries(1)})),
    "further keys": (256, "extra", lambda n: ("match_prefix", extra(*range(0, 4 * n, 4)), {})),
    "bytes of a further key": (32, "key", lambda n: ("match_prefix", extra(0, size=n), {})),
    "bytes of an id": (
        128,
        "id",
        lambda n: ("create_sequences", {"sequences": [{"id": "a" * n}]}, {}),
    ),
    "tensors": (
        64,
        "tensors",
        lambda n: ("info", {}, {f"x{number}": zeros(1) for number in range(n)}),
    ),
}


def refusal(request: Request) -> Exception | None:
    try:
        prepared(*request)
    except (InvalidRequest, MalformedBody) as error:
        return error
    return None


@pytest.mark.parametrize("of", LIMITS)
def test_a_limit_is_where_the_page_says(of: str) -> None:
    limit, field, request = LIMITS[of]
    if of == "tensors":  # none is known here, and which is refused first says how far it was read
        assert isinstance(refusal(request(limit)), InvalidRequest)
        assert isinstance(refusal(request(limit + 1)), MalformedBody)
        return
    for within in (limit - 1, limit):
        assert refusal(request(within)) is None, within
    refused = refusal(request(limit + 1))
    assert isinstance(refused, InvalidRequest) and field in refused.field, refused
