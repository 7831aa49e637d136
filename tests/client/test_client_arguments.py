"""Arguments of every kind of number; what would mean something else is refused with a remedy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any, get_args, get_origin, get_type_hints

import attnd
import numpy as np
import pytest
import torch
from attnd import AsyncClient, Client, Prefix, Session
from attnd.methods import Operations
from attnd.steps.stepper import Stepper
from scripted_server import WHOLE, ScriptedServer, answering

from tests.client.client_stub import (
    QUICK,
    SEQUENCE,
    Blocking,
    Kind,
    Script,
    answer,
    ask,
    attended,
    client_of,
    problem,
    tensor_answer,
)

Q = np.ones((2, 4, 8), np.float32)
K = np.ones((2, 2, 8), np.float32)
LEASE = attnd.Lease("a", 1.0)


ATTENDED = attended(2, lengths=[1, 1])


@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8, int, Fraction, torch.tensor])
def test_integers_of_every_kind_are_sent_as_integers(
    kind: Kind, number: Callable[[int], Any]
) -> None:
    script = Script(ATTENDED)
    offsets = [number(3), number(4)]
    ask(kind, script, "append", number(1), ["a", "b"], K, K + 1, offsets=offsets)
    assert script.fields() == {"layer": 1, "sequences": ["a", "b"], "offsets": [3, 4]}
    ask(kind, script, "prefill", number(1), ["a", "b"], Q, [number(0), number(1), number(2)])
    assert script.fields()["qo_indptr"] == [0, 1, 2]
    script = Script(answer(SEQUENCE))
    ask(kind, script, "truncate", "a", number(7), keep=[number(9)], reserve=number(0))
    assert script.fields() == {"length": 7, "keep": [9], "reserve": 0}
    new = attnd.NewSequence("a", "b", number(5), ttl_s=number(60))
    script = Script(answer({"sequences": [SEQUENCE]}))
    ask(kind, script, "create_sequences", [new])
    assert script.fields()["sequences"] == [{"id": "a", "parent": "b", "length": 5, "ttl_s": 60.0}]
    script = Script(answer({"sequences": [SEQUENCE]}))
    ask(kind, script, "create_sequences", [new, replace(new, reserve=0)], reserve=number(3))
    assert [one["reserve"] for one in script.fields()["sequences"]] == [3, 0]


def test_the_types_of_all_ints_take_numpys() -> None:
    """As strict checkers see it: where an argument is an int, it may be numpy's."""
    of_steps = {"step": Stepper.step, "slots": Stepper.slots}
    builds = {name: one.build for name, one in vars(Operations).items() if hasattr(one, "build")}
    for name, build in (builds | of_steps).items():
        for field, kind in get_type_hints(build).items():
            kinds = [kind, *get_args(kind)]
            if field != "return" and int in kinds:
                assert np.integer in map(get_origin, kinds), f"{name}({field}) is {kind}"


def test_floats_flags_and_strings_of_numpy_are_sent_as_they_are(kind: Kind) -> None:
    script = Script(ATTENDED)
    options: dict[str, Any] = {
        "sm_scale": np.float32(0.5),
        "logits_soft_cap": np.float64(30),
        "window_left": np.int16(7),
        "causal": np.bool_(True),
        "lse_base": np.str_("2"),
    }
    ask(kind, script, "prefill", 0, np.array(["a", "b"]), Q, np.array([0, 1, 2]), **options)
    assert script.fields() == {
        "layer": 0,
        "sequences": ["a", "b"],
        "qo_indptr": [0, 1, 2],
        "causal": True,
        "sm_scale": 0.5,
        "logits_soft_cap": 30.0,
        "window_left": 7,
        "lse_base": "2",
    }


REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("decode", (0, "chat-1", Q), {}, r"\['chat-1'\]"),
    ("append", (0, "chat-1", K, K), {}, r"\['chat-1'\]"),
    ("gather", (0, "chat-1"), {}, r"\['chat-1'\]"),
    ("page_table", ("chat-1",), {}, r"\['chat-1'\]"),
    ("delete_sequences", ("chat-1",), {}, r"\['chat-1'\]"),
    ("delete_sequences", (), {}, "give ids, or prefix"),
    ("truncate_sequences", ("chat-1", [1]), {}, r"\['chat-1'\]"),
    ("cascade", (0, [attnd.CascadeLevel("chat-1", [0, 2])], Q), {}, r"levels\[0\].sequences"),
    ("decode", (0, None, Q), {}, "sequences is None .* a list of ids"),
    ("page_table", (5,), {}, r"sequences is 5 \(int\): it must be a list of ids"),
    ("decode", (0, {"a", "b"}, Q), {}, "sequences is .* a list of ids"),
    ("truncate_sequences", (frozenset("ab"), [1, 2]), {}, "a list of ids"),
    ("decode", (0, [b"a", 5], Q), {}, r"sequences\[0\] is b'a'"),
    ("truncate", (["a", "b"], 3), {}, "truncate_sequences"),
    ("truncate", ("a", 0.5), {}, "whole number"),
    ("truncate", ("a", 5), {"keep": [5.5]}, r"keep\[0\] is 5.5"),
    ("truncate_sequences", (["a", "b"], [1, 2]), {"keep": [[3]]}, "one per sequence"),
    ("commit", (["a"], Prefix([1])), {}, "commit_sequences"),
    ("commit", ("a", Prefix("abc")), {}, "token_ids is 'abc'"),
    ("commit", ("a", Prefix(page_keys="0f" * 16)), {}, "a list of keys"),
    ("commit_sequences", (["a", "b"], [Prefix([1])]), {}, "one per sequence"),
    (
        "commit_sequences",
        (["a", "b"], [Prefix([1]), Prefix(page_keys=["0f" * 16])]),
        {},
        "all by token_ids",
    ),
    ("create_sequences", (["a"],), {}, r"sequences\[0\] is .a. .*of attnd.NewSequence"),
    ("create_sequences", ([{"id": "a"}],), {}, r"sequences\[0\] is .*list of attnd.NewSequence"),
    ("create_sequences", (attnd.NewSequence("a"),), {}, "it must be a list of attnd.NewSequence"),
    ("create_sequences", (None,), {}, "it must be a list of attnd.NewSequence"),
    ("cascade", (0, [(["a"], [0, 1])], Q), {}, r"levels\[0\] is .*list of attnd.CascadeLevel"),
    ("cascade", (0, Q, []), {}, "list of attnd.CascadeLevel"),
    ("match_prefix", (Prefix([1], tiers="disk"),), {}, r"such as \['disk'\]"),
    *(
        ("match_prefix", (one,), {}, "token_ids")
        for one in (Prefix(), Prefix([-1]), Prefix([2**32]))
    ),
    ("match_prefix", (Prefix(page_keys=["00"]),), {}, "16"),
    ("match_prefix", (Prefix(page_keys=np.zeros((2, 15), np.uint8)),), {}, "16"),
    ("match_prefix", (Prefix(page_keys=["0" * 31]),), {}, "32 digits in hex"),
    ("match_prefix", (Prefix(page_keys=[16]),), {}, "32 digits in hex"),
    ("gather", (0, ["a"]), {"dtype": np.float32}, "dtype is .*a string"),
    ("prefill", (0, ["a"], Q[:1], [0, 1]), {"mask": np.ones(4, np.int64)}, "bool, or uint8"),
    ("prefill", (0, ["a"], Q[:1], [0, 1]), {"mask": [[True]]}, r"np.asarray\(mask, dtype=bool"),
    ("get_sequence", (5,), {}, "must be an id"),
    ("create_sequence", (), {"prefix": [1, 2]}, "prefix is .* it must be an attnd.Prefix"),
    ("match_prefix", ([1, 2],), {}, "it must be an attnd.Prefix"),
    ("prefetch", ("a",), {}, "it must be an attnd.Prefix"),
    ("commit", ("a", [1, 2]), {}, "it must be an attnd.Prefix"),
    ("commit_sequences", (["a"], [[1, 2]]), {}, "it must be an attnd.Prefix"),
    ("delete_sequence", (["a"],), {}, "must be an id"),
    ("append", (0, ["a", "b"], K, K), {"offsets": [0.7, 1]}, r"offsets\[0\] is 0.7"),
    ("append", (0, ["a", "b"], K, K), {"offsets": np.array([0.7, 1])}, r"offsets\[0\] is 0.7"),
    ("append", (0, ["a", "b"], K, K), {"offsets": ["1", 2]}, r"offsets\[0\] is '1'"),
    ("append", (0, ["a", "b"], K, K), {"offsets": 3}, "a list of ints"),
    ("append", (0, ["a", "b"], K, K), {"append_indptr": "012"}, "a list of ints"),
    ("decode", (0, ["a", "b"], Q.tolist()), {}, r"np.asarray\(q"),
    ("decode", (0, ["a", "b"], Q), {"k": K.tolist(), "v": K}, r"np.asarray\(k"),
    ("decode", (0, ["a", "b"], torch.ones(2, 4, 8)), {}, r"numpy\(\)"),
    ("decode", (0, ["a", "b"], np.ma.masked_less(Q, 0)), {}, r"filled\(0\)"),
    ("append", (0, ["a", "b"], K, torch.ones(2, 2, 8)), {}, r"v is a torch.Tensor"),
    ("prefill", (0, ["a", "b"], Q, [0, 1, 2]), {"mask": [True]}, r"mask is \[True\]"),
    ("merge", (Q.tolist(), Q), {}, r"np.asarray\(o"),
    ("decode", (0, ["a", "b"], Q), {"sm_scale": object()}, "sm_scale is <object"),
    ("decode", (0, ["a", "b"], Q), {"sm_scale": math.nan}, "sm_scale is nan: .* finite"),
    (
        "decode",
        (0, ["a", "b"], Q),
        {"logits_soft_cap": np.inf},
        "logits_soft_cap is inf",
    ),
    ("renew_lease", (LEASE,), {}, r"lease is Lease\(.* must be an id"),
    ("release_lease", (LEASE,), {}, r"lease is Lease\(.* must be an id"),
    ("get_namespace", (None,), {}, "name is None .* must be an id"),
    ("set_namespace", (None,), {}, "name is None .* must be an id"),
    ("drain_engine", (0,), {}, "name is 0 .* must be an id"),
    ("pin", (None,), {"hard": True}, "32 digits in hex"),
    ("unpin", (1.5,), {}, "32 digits in hex"),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "says"), REFUSED)
def test_what_would_mean_something_else_is_refused_with_a_remedy(
    kind: Kind, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], says: str
) -> None:
    script = Script(ATTENDED)
    with pytest.raises((TypeError, ValueError), match=says):
        ask(kind, script, name, *args, **kwargs)
    assert not script.requests


def test_a_page_key_of_numpy_is_sent_in_hex(kind: Kind) -> None:
    script = Script(answer({"num_pages": 1}))
    assert ask(kind, script, "pin", np.arange(16, dtype=np.uint8), hard=True) == 1
    assert script.fields()["page_key"] == bytes(range(16)).hex()


def test_the_service_refuses_arrays_without_dimensions(kind: Kind) -> None:
    script, nothing = Script(problem(422, "invalid_request")), np.array(1.0, np.float32)
    for name, args in (("decode", (0, ["a"], nothing)), ("merge", (nothing, 0.0))):
        with pytest.raises(attnd.InvalidRequest):
            ask(kind, script, name, *args)


@pytest.mark.parametrize("made", [Client, AsyncClient, Session])
def test_timeouts_and_retries_of_a_client_are_checked_when_it_is_made(made: Any) -> None:
    for options, says in (
        ({"timeout": None}, "timeout is None: it must be seconds"),
        ({"timeout": "3"}, "timeout is '3'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": math.nan}, "timeout is nan"),
        ({"retries": None}, "retries is None: .* or attnd.Retries"),
        ({"retries": 1.5}, "retries is 1.5"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            made(**options)


@pytest.mark.parametrize("timeout", [math.inf, 1e9, np.float32(30)])
def test_timeouts_can_be_long_or_numpys(kind: Kind, timeout: Any) -> None:
    with (
        ScriptedServer(answering(WHOLE)) as server,
        client_of(kind, server.url, timeout=timeout, retries=np.int64(1)) as client,
    ):
        assert client.get_sequence("a").id == "a"


def test_a_wrong_argument_of_a_repeated_call_is_refused_too() -> None:
    script = Script(ATTENDED)
    with Client(transport=Blocking(script), retries=QUICK) as client:
        for _ in range(3):
            client.append(0, ["a", "b"], K, K + 1, offsets=[1, 2])
        with pytest.raises(ValueError, match="whole number"):
            client.append(0, ["a", "b"], K, K + 1, offsets=[1, 2.5])  # type: ignore[list-item]
    assert len(script.requests) == 3


@pytest.mark.parametrize("made", [Client, AsyncClient, Session])
def test_signatures_name_the_result_and_every_option(made: type) -> None:
    shown = str(inspect.signature(made.decode))  # type: ignore[attr-defined]
    assert shown.endswith("-> AttentionResult")
    assert "window_left: int" in shown and "cascade: Literal['auto'" in shown
    for name, method in vars(made).items():
        if not name.startswith("_") and name != "send" and callable(method):
            assert "Call[" not in str(inspect.signature(method)), name


def test_cuts_and_commits_of_many_are_one_request(kind: Kind) -> None:
    script = Script(answer({"sequences": [SEQUENCE, SEQUENCE]}))
    reply = ask(kind, script, "truncate_sequences", ["a", "b"], [3, 4], keep=[[], np.array([6, 8])])
    assert len(reply) == 2
    assert script.fields() == {
        "sequences": ["a", "b"],
        "lengths": [3, 4],
        "keep": [6, 8],
        "keep_indptr": [0, 0, 2],
    }
    columns = {"committed_lens": [16, 0], "num_pages": [1, 0], "last_keys": ["0f" * 16, None]}
    script = Script(answer(columns))
    prefixes = [Prefix([1, 2, 3]), Prefix(np.array([4, 5]))]
    reply = ask(kind, script, "commit_sequences", ["a", "b"], prefixes, offsets=[16, 0])
    assert [(one.committed_len, one.num_pages) for one in reply] == [(16, 1), (0, 0)]
    assert reply[0].last_key == "0f" * 16
    message = script.message()
    assert message.fields == {
        "sequences": ["a", "b"],
        "names_indptr": [0, 3, 5],
        "offsets": [16, 0],
    }
    assert message.tensors["token_ids"].tolist() == [1, 2, 3, 4, 5]


def test_a_set_of_ids_can_be_deleted(kind: Kind) -> None:
    script = Script(answer({"num_deleted": 2}))
    assert ask(kind, script, "delete_sequences", {"b", "a"}) == 2
    assert script.fields() == {"ids": ["a", "b"]}


def test_an_append_for_many_layers_names_them(kind: Kind) -> None:
    k = np.ones((3, 2, 2, 8), np.float32)
    for layers in ([0, 1, 5], (0, 1, 5), np.array([0, 1, 5])):
        script = Script(tensor_answer({"lengths": [4, 5]}))
        assert ask(kind, script, "append", layers, ["a", "b"], k, k + 1).lengths == (4, 5)
        assert script.fields() == {"layers": [0, 1, 5], "sequences": ["a", "b"]}


def test_a_deadline_shorter_than_the_service_takes_passes_here(kind: Kind) -> None:
    script = Script(answer(SEQUENCE))
    ask(kind, script, "get_sequence", "a", deadline=0.0005)
    assert float(script.requests[-1].headers["x-attnd-deadline-ms"]) == 1.0
    assert script.requests[-1].timeout_s <= 0.0005


def test_an_infinite_deadline_is_none_and_no_number_is_refused(kind: Kind) -> None:
    script = Script(answer(SEQUENCE))
    ask(kind, script, "get_sequence", "a", deadline=math.inf)
    assert "x-attnd-deadline-ms" not in script.requests[-1].headers
    for made in (Client, AsyncClient):
        with pytest.raises(ValueError, match="deadline is nan: it must be seconds, or None"):
            made().with_options(deadline=math.nan)
