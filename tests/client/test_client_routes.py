"""Every method: its request, and the result it makes of the answer."""

from __future__ import annotations

import gc
import inspect
import weakref
from dataclasses import replace
from typing import Any

import attnd
import ml_dtypes
import numpy as np
import pytest
from attnd import AsyncClient, Client, NewSequence, Session

from tests.client.client_stub import (
    SEQUENCE,
    Blocking,
    Kind,
    Script,
    Scripted,
    answer,
    ask,
    attended,
    client_of,
    problem,
    tensor_answer,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
METHODS = [name for name in dir(Client) if not name.startswith("_") and name != "close"]


def sent(script: Script, i: int = -1) -> tuple[str, str]:
    request = script.requests[i]
    return request.method, request.target


def test_sequences_are_created_as_asked(kind: Kind) -> None:
    script = Script(answer({"sequences": [SEQUENCE, SEQUENCE]}, 201, x_request_id="r1"))
    new = [NewSequence(), NewSequence("b", parent="a", length=3)]
    first, _ = ask(kind, script, "create_sequences", new)
    assert sent(script) == ("POST", "/v1/sequences")
    assert script.fields() == {"sequences": [{}, {"id": "b", "parent": "a", "length": 3}]}
    assert first == attnd.SequenceInfo("a", 5, (5, 6), 2, 1, None)
    assert first.meta.request_id == "r1"


def test_one_sequence_is_got_truncated_and_deleted_by_its_path(kind: Kind) -> None:
    script = Script(answer(SEQUENCE))
    assert ask(kind, script, "get_sequence", "a:1/..").length == 5
    assert sent(script) == ("GET", "/v1/sequences/a%3A1%2F..")
    assert ask(kind, script, "truncate", "a", 5).lengths == (5, 6)
    assert sent(script) == ("POST", "/v1/sequences/a/truncate")
    assert script.fields() == {"length": 5}
    script = Script(Scripted(204))
    assert ask(kind, script, "delete_sequence", "a") is None
    assert sent(script) == ("DELETE", "/v1/sequences/a")


def test_an_empty_id_is_an_invalid_request_as_a_session_has_it(kind: Kind) -> None:
    script = Script(answer(SEQUENCE))
    for call in (("get_sequence", ""), ("truncate", "", 5), ("get_namespace", "")):
        with pytest.raises(attnd.InvalidRequest, match="is empty") as raised:
            ask(kind, script, *call)
        assert raised.value.value == "" and raised.value.request_id
    assert not script.requests


def pages() -> Script:
    return Script(
        answer({"sequences": [{**SEQUENCE, "id": "a"}, {**SEQUENCE, "id": "b"}], "next": "b"}),
        answer({"sequences": [{**SEQUENCE, "id": "c"}], "next": None}),
    )


def test_the_list_is_fetched_page_by_page_as_it_is_read() -> None:
    script = pages()
    with Client(transport=Blocking(script)) as client:
        listing = client.list_sequences(page_size=2)
        assert next(listing).id == "a"
        assert len(script.requests) == 1
        assert [sequence.id for sequence in listing] == ["b", "c"]
    assert sent(script, 0)[1] == "/v1/sequences?limit=2"
    assert sent(script, 1)[1] == "/v1/sequences?after=b&limit=2"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_append_sends_rows_and_gives_lengths(kind: Kind, dtype: np.dtype[Any]) -> None:
    k = np.arange(48).reshape(3, 2, 8).astype(dtype)
    script = Script(tensor_answer({"lengths": [1, 9]}))
    indptr, offsets = np.array([0, 1, 3], np.int32), [0, 7]
    args = (2, ["a", "b"], k, k + k)
    result = ask(kind, script, "append", *args, append_indptr=indptr, offsets=offsets)
    assert result.lengths == (1, 9)
    message = script.message()
    assert sent(script) == ("POST", "/v1/append")
    assert script.requests[-1].headers["content-type"] == "application/vnd.safetensors"
    assert message.fields == {
        "layer": 2,
        "sequences": ["a", "b"],
        "append_indptr": [0, 1, 3],
        "offsets": [0, 7],
    }
    assert message.tensors["k"].tobytes() == k.tobytes()
    assert message.tensors["v"].dtype == k.dtype
    assert ask(kind, script, "append", 0, ["a", "b"], k[:2], k[:2]).lengths == (1, 9)
    assert set(script.fields()) == {"layer", "sequences"}


def test_decode_gives_the_state_and_how_it_was_made(kind: Kind) -> None:
    o, lse = np.ones((2, 4, 8)).astype(BF16), np.full((2, 4), -np.inf, np.float32)
    fields = {"lse_base": "2", "levels": 3, "cascade": True}
    timing = {"server_timing": "queue;dur=0.5, kernel;desc=x;dur=2", "x_request_id": "r2"}
    script = Script(tensor_answer(fields, {"o": o, "lse": lse}, **timing))
    result = ask(kind, script, "decode", 0, ["a", "b"], o, lse_base="2", sm_scale=0.5)
    assert script.fields() == {
        "layer": 0,
        "sequences": ["a", "b"],
        "lse_base": "2",
        "sm_scale": 0.5,
    }
    assert result.o.dtype == BF16
    assert np.isneginf(result.lse).all()
    assert (result.lse_base, result.levels, result.cascade) == ("2", 3, True)
    assert result.state.lse_base == "2"
    assert result.meta.request_id == "r2"
    assert result.meta.timings == {"queue": 0.0005, "kernel": 0.002}


def test_prefill_sends_a_mask_by_its_dtype(kind: Kind) -> None:
    q = np.zeros((2, 4, 8), np.float16)
    script = Script(attended(2))
    ask(kind, script, "prefill", 1, ["a"], q, [0, 2], causal=True, window_left=4)
    assert script.fields() == {
        "layer": 1,
        "sequences": ["a"],
        "qo_indptr": [0, 2],
        "causal": True,
        "window_left": 4,
    }
    ask(kind, script, "prefill", 1, ["a"], q, [0, 2], mask=np.ones(6, bool))
    assert set(script.message().tensors) == {"q", "mask"}
    ask(kind, script, "prefill", 1, ["a"], q, [0, 2], mask=np.ones(1, np.uint8))
    assert set(script.message().tensors) == {"q", "packed_mask"}


def test_pool_and_metrics_are_read(kind: Kind) -> None:
    pool = {
        "free": 5,
        "referenced": 1,
        "cached": 1,
        "pinned": 1,
        "total": 8,
        "leases": 4,
        "sequences": 2,
        "nodes": 3,
        "imports": 2,
        "sharing_ratio": 1.5,
        "integrity": "ok",
    }
    found = ask(kind, Script(answer(pool)), "pool")
    assert found == attnd.Pool(5, 1, 1, 1, 8, 4, 2, 3, 1.5, "ok", imports=2)
    numbers = {"free": 5, "referenced": 1, "cached": 1, "pinned": 1, "sequences": 2}
    numbers |= {"page_s": 0.25, "pair_s": 0.5, "read_s": 0.125}
    one = {"name": "engine-0", "instance_id": "a", "draining": True} | numbers
    engines = {"engines": [one]}
    found = ask(kind, Script(answer(engines)), "engines")
    known = attnd.EngineInfo("engine-0", "a", 5, 1, 1, 1, 2, True, 0.25, 0.5, 0.125)
    assert found == (known,)
    engines = {"engines": [one | {"leases": 4, "imports": 3}]}
    found = ask(kind, Script(answer(engines)), "engines")
    assert found == (replace(known, leases=4, imports=3),)
    counted = Script(answer({"engines": [one | {"counts": {"slices": [3]}}]}))
    (found,) = ask(kind, counted, "engines", counts=True)
    assert found.counts == {"slices": [3]}
    assert sent(counted) == ("GET", "/v1/engines?counts=true")
    script = Script(answer({"name": "engine-0", "draining": True, "sequences": 2}))
    assert ask(kind, script, "drain_engine", "engine-0") == 2
    assert sent(script) == ("POST", "/v1/engines/engine-0/drain")
    assert script.fields() == {"stop": False}
    text = "# HELP attnd_x x\nattnd_x 1.0\n"
    plain = {"content-type": "text/plain; version=1.0.0; charset=utf-8"}
    reply = Scripted(200, text.encode(), plain)
    assert ask(kind, Script(reply), "metrics") == text


def test_info_is_typed_and_ignores_fields_of_a_later_service(kind: Kind) -> None:
    geometry = {"num_layers": 2, "num_pages": 8, "page_size": 16, "num_kv_heads": 2, "head_dim": 64}
    storage = {"layout": "NHD", "dtype": "fp8_e4m3", "k_scale": 1.0, "v_scale": 0.5}
    service = {"version": "0.1.0", "instance_id": "i", "backend": "cpu", "device": "cpu"}
    takes = {"tensor_dtypes": ["fp16"], "unsupported": [], "limits": {"queue_depth": 4}, "new": 1}
    info = ask(kind, Script(answer({**geometry, **storage, **service, **takes})), "info")
    assert (info.page_size, info.v_scale, info.tensor_dtypes) == (16, 0.5, ("fp16",))
    assert info.token_bytes == 2 * 2 * 64
    assert info.limits["queue_depth"] == 4


def test_a_service_that_is_not_ready_is_an_answer_and_not_retried(kind: Kind) -> None:
    script = Script(problem(503, "not_ready"), answer({"status": "ready"}))
    health = ask(kind, script, "ready")
    assert (health.ok, health.reason) == (False, "what happened")
    assert ask(kind, script, "ready").ok


def test_waiting_for_ready_outlasts_a_start_and_raises_the_reason(kind: Kind) -> None:
    script = Script(
        attnd.ConnectionFailed("refused"), problem(503, "not_ready"), answer({"status": "ready"})
    )
    ask(kind, script, "wait_ready", 10, retries=attnd.Retries(0))
    with pytest.raises(TimeoutError, match="what happened"):
        ask(kind, Script(problem(503, "not_ready")), "wait_ready", 0)


@pytest.mark.parametrize("other", [AsyncClient, Session])
def test_all_clients_have_the_same_methods_with_the_same_signatures(other: type) -> None:
    for name in METHODS:
        blocking, theirs = getattr(Client, name), getattr(other, name)
        mine, its = (list(inspect.signature(f).parameters) for f in (blocking, theirs))
        assert mine == its, name
        assert blocking.__doc__, f"{name} has no documentation"


def test_a_method_shows_the_signature_that_is_called() -> None:
    with Client(transport=Blocking(Script(attended()))) as client:
        assert list(inspect.signature(client.decode).parameters)[:3] == ["layer", "sequences", "q"]


@pytest.mark.parametrize(
    "reply",
    [
        answer({"nothing": 1}),
        answer([1, 2]),
        Scripted(200, b"{", headers={"content-type": "application/json"}),
        Scripted(200, b"x", headers={"content-type": "application/vnd.safetensors"}),
        Scripted(200, b"<html>", headers={"content-type": "text/html"}),
        tensor_answer({"lse_base": "e", "levels": 1, "cascade": False}),
    ],
)
def test_an_answer_that_is_not_attnds_is_a_protocol_error(kind: Kind, reply: Scripted) -> None:
    with pytest.raises(attnd.ProtocolError):
        ask(kind, Script(reply), "decode", 0, ["a"], np.zeros((1, 4, 8), np.float32))


def test_no_array_is_kept_by_the_client(kind: Kind) -> None:
    script = Script(attended())
    with client_of(kind, script=script) as client:
        q = np.ones((1, 4, 8), np.float32)
        seen = weakref.ref(q)
        for _ in range(2):
            client.decode(0, ["a"], q)
        script.requests.clear()
        del q
        gc.collect()
        assert seen() is None
