"""Every method: may it be sent again after a lost reply, by docs/api.md; never by the code's flags.

A method that changes what it changed once more, or names what is made by it, is sent once. Of some
a second attempt is refused, and the refusal shows that the first one was executed.
"""

from __future__ import annotations

from typing import Any, Final

import attnd
import numpy as np
import pytest
from attnd import Client, ExportHeader, ExportPart, NewSequence, Prefix

from tests.client.client_stub import Kind, Script, answer, ask, problem

Call = tuple[tuple[Any, ...], dict[str, Any]]
K: Final = np.zeros((1, 2, 8), np.float32)
Q: Final = np.zeros((1, 4, 8), np.float32)
LSE: Final = np.zeros((1, 4), np.float32)
KEY: Final = "0c" * 32
NAMES: Final = Prefix([1, 2, 3])
HEADER: Final = ExportHeader({"generation": "g", "part_bytes": 64, "num_parts": 1}, "d", {})
PART: Final = ExportPart(0, "d", "e", K, K)
LEVEL: Final = attnd.CascadeLevel(["a"], [0, 1])


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


AGAIN: Final[dict[str, list[Call]]] = {
    "append": [call(0, ["a"], K, K, offsets=[5])],
    "begin_import": [call("a", HEADER)],
    "cancel_import": [call("a")],
    "cascade": [call(0, [LEVEL], Q)],
    "clear": [call()],
    "commit": [call("a", NAMES)],
    "commit_sequences": [call(["a", "b"], [NAMES, NAMES])],
    "clear_records": [call()],
    "contains_records": [call([b"a"], stamp="m", job="j")],
    "delete_records": [call([b"a"], stamp="m")],
    "get_records": [call([b"a"], stamp="m")],
    "put_records": [call([b"a"], [b"1"], stamp="m")],
    "release_records": [call("j")],
    "touch_records": [call([b"a"], stamp="m")],
    "decode": [call(0, ["a"], Q), call(0, ["a"], Q, k=K, v=K, offsets=[5])],
    "delete_sequence": [call("a")],
    "delete_sequences": [call(["a"]), call(prefix="a")],
    "drain_engine": [call("engine-0"), call("engine-0", stop=True)],
    "end_import": [call("a", "d")],
    "engines": [call()],
    "event_page": [call(4)],
    "export_header": [call("a")],
    "export_part": [call("a", HEADER, 0, before="d")],
    "gather": [call(0, ["a"])],
    "get_import": [call("a")],
    "get_namespace": [call("a")],
    "get_sequence": [call("a")],
    "holds": [call()],
    "import_part": [call("a", PART)],
    "info": [call()],
    "live": [call()],
    "match_prefix": [call(NAMES), call(NAMES, lease_s=0.0)],
    "merge": [call(Q, LSE)],
    "metrics": [call()],
    "page_table": [call(["a"])],
    "pin": [call(KEY, hard=True)],
    "pool": [call()],
    "prefetch": [call(NAMES)],
    "prefill": [call(0, ["a"], Q, [0, 1]), call(0, ["a"], Q, [0, 1], k=K, v=K, offsets=[5])],
    "ragged_prefill": [call(Q, K, K, [0, 1], [0, 1])],
    "ready": [call()],
    "release_lease": [call("l")],
    "renew_lease": [call("l")],
    "sequence_page": [call()],
    "set_namespace": [call("a", max_pages=3)],
    "snapshot": [call()],
    "truncate": [call("a", 3)],
    "truncate_sequences": [call(["a", "b"], [3, 4]), call(["a"], [3], keep=[[]])],
    "unpin": [call(KEY)],
}
ONCE: Final[dict[str, list[Call]]] = {
    "append": [call(0, ["a"], K, K), call([0, 1], ["a"], K[None], K[None])],
    "create_sequence": [call(), call("a"), call(parent="a"), call(prefix=NAMES)],
    "create_sequences": [call([NewSequence("a")])],
    "decode": [call(0, ["a"], Q, k=K, v=K)],
    "evict": [call(3)],
    "prefill": [call(0, ["a"], Q, [0, 1], k=K, v=K)],
    "truncate": [call("a", 3, keep=[5])],
    "truncate_sequences": [call(["a", "b"], [3, 3], keep=[[], [5]])],
}
OF_OTHERS: Final = {"events", "export", "import_", "list_sequences", "wait_ready"}
"""They are made of several calls of other methods."""
NO_CALLS: Final = {"close", "send", "with_options"}
LANDED: Final[dict[str, tuple[int, str, dict[str, Any]]]] = {
    "cancel_import": (404, "unknown_import", {"id": "a"}),
    "delete_sequence": (404, "unknown_sequence", {"sequences": ["a"]}),
    "end_import": (409, "sequence_exists", {"sequences": ["a"]}),
    "import_part": (409, "part_mismatch", {"next_part": 1}),
    "release_lease": (404, "unknown_lease", {"lease": "l"}),
    "unpin": (404, "unknown_page", {"page_key": KEY}),
}
"""What a second attempt is refused with when the first one was executed."""


def cases(table: dict[str, list[Call]]) -> list[Any]:
    return [
        pytest.param(name, *one, id=f"{name}-{number}")
        for name, calls in table.items()
        for number, one in enumerate(calls)
    ]


def test_every_method_is_in_the_tables() -> None:
    methods = {name for name in dir(Client) if not name.startswith("_")}
    assert methods == AGAIN.keys() | ONCE.keys() | OF_OTHERS | NO_CALLS


@pytest.mark.parametrize(("name", "args", "kwargs"), cases(AGAIN))
def test_a_call_that_does_no_harm_twice_is_sent_again_as_it_was(
    kind: Kind, name: str, args: Any, kwargs: Any
) -> None:
    script = Script(attnd.ReplyLost("reset by peer"), problem(500, "internal"))
    with pytest.raises(attnd.Internal) as caught:
        ask(kind, script, name, *args, **kwargs)
    first, second = script.requests
    assert (first.method, first.target) == (second.method, second.target)
    assert script.content(0) == script.content(1) and first.request_id == second.request_id
    assert isinstance(caught.value.__cause__, attnd.ReplyLost), "it may have been executed"


@pytest.mark.parametrize(("name", "args", "kwargs"), cases(ONCE))
def test_a_call_that_would_do_harm_twice_is_sent_once(
    kind: Kind, name: str, args: Any, kwargs: Any
) -> None:
    script = Script(attnd.ReplyLost("reset by peer"), problem(500, "internal"))
    with pytest.raises(attnd.ReplyLost):
        ask(kind, script, name, *args, **kwargs)
    assert len(script.requests) == 1


@pytest.mark.parametrize("name", LANDED)
def test_a_refused_second_attempt_shows_that_the_first_was_executed(kind: Kind, name: str) -> None:
    status, code, numbers = LANDED[name]
    ((args, kwargs),) = AGAIN[name]
    refusal = problem(status, code, **numbers)
    state = answer({"id": "a", "state": "receiving", "next_part": 1, "num_parts": 2})
    ask(kind, Script(attnd.ReplyLost("reset by peer"), refusal, state), name, *args, **kwargs)
    with pytest.raises(attnd.ServiceError):
        ask(kind, Script(refusal, state), name, *args, **kwargs)
