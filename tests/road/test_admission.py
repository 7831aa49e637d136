"""Authentication on the road: sessions, doors, and the tenants of calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attnd.wire import frames as f
from plain_caller import PlainCaller, call_frame, problem_of, session_and_caller
from scripted_engine_end import config

from service.keys import Key, Keys, line_of, read_line
from service.road.engine_end.admission import Admission
from service.road.engine_end.calls import Call, SessionConfig
from service.road.engine_end.session import Session
from service.road.messages import Announced, message
from service.tenants import ANONYMOUS, OPEN, tenant_of

SECRET = "known to the service's own processes only"


def key_of(shown: str, namespace: str, *scopes: str) -> Key:
    return read_line(line_of(shown, namespace, scopes).split())


def rules(*keys: Key, secret: str = SECRET) -> SessionConfig:
    known = Keys({one.digest: one for one in keys}) if keys else None
    return config(admission=Admission(known, secret))


def greet(caller: PlainCaller, **given: Any) -> None:
    hello = {"version": 1, "arena_bytes": 65536} | given
    caller.send(f.frame(f.HELLO, json.dumps(hello).encode()))


def announced(number: int, namespace: str, *scopes: str) -> bytes:
    return message(f.TENANT, Announced(number, namespace, scopes))


def calls_of(session: Session) -> list[Call]:
    return [event for event in session.read() if isinstance(event, Call)]


KEYS = (key_of("open sesame", "cave", "read"), key_of("other", "mountain", "read", "append"))


def test_without_keys_everybody_is_the_same_tenant_whatever_key_is_shown() -> None:
    with session_and_caller(rules(), greet=False) as (session, caller):
        greet(caller, key="of another service")
        caller.send(call_frame())
        assert [call.tenant for call in calls_of(session)] == [OPEN]


def test_with_keys_a_session_is_in_the_namespace_of_its_key() -> None:
    with session_and_caller(rules(*KEYS), greet=False) as (session, caller):
        greet(caller, key="open sesame")
        caller.send(call_frame())
        assert [call.tenant for call in calls_of(session)] == [tenant_of("cave", ["read"])]


@pytest.mark.parametrize(
    ("hello", "detail"),
    [
        ({}, "requires a key: give it as api_key of the session, or as key in HELLO"),
        ({"key": "open barley"}, "unknown or revoked API key"),
        ({"door": True}, "only processes that the service has started are its doors"),
        ({"door": True, "key": "open sesame"}, "its doors"),
        ({"door": True, "secret": SECRET[:-1]}, "its doors"),
        ({"door": False, "secret": SECRET}, "requires a key"),
    ],
)
def test_a_false_claim_is_refused(hello: dict[str, Any], detail: str) -> None:
    with session_and_caller(rules(*KEYS), greet=False) as (session, caller):
        greet(caller, **hello)
        caller.send(call_frame())
        assert session.read() == []
        kind, problem = caller.one()
        assert kind == f.REFUSED and session.ended
        assert (problem["status"], problem["code"]) == (401, "unauthorized")
        assert detail in problem["detail"] and "sesame" not in str(problem)


def test_without_a_secret_no_caller_is_a_door() -> None:
    with session_and_caller(rules(secret=""), greet=False) as (session, caller):
        greet(caller, door=True, secret="")
        assert session.read() == []
        assert caller.one()[1]["code"] == "unauthorized"


@pytest.mark.parametrize("field", ["key", "secret"])
@pytest.mark.parametrize("value", [7, None, ["open sesame"], "schlüssel"])
def test_what_cannot_be_a_key_is_refused_without_telling_it(field: str, value: Any) -> None:
    with session_and_caller(rules(*KEYS), greet=False) as (session, caller):
        greet(caller, **{field: value})
        assert session.read() == []
        problem = caller.one()[1]
        assert f"{field} in HELLO" in problem["detail"]
        assert str(value) not in problem["detail"]


def test_a_door_names_the_tenants_of_its_calls_and_has_no_rights_itself() -> None:
    cave, mountain = (key.tenant for key in KEYS)
    with session_and_caller(rules(*KEYS), greet=False) as (session, caller):
        greet(caller, door=True, secret=SECRET)
        caller.send(
            announced(1, "cave", "read"),
            call_frame(1, reserved=1),
            announced(2, "mountain", "append", "read"),
            call_frame(2, reserved=2),
            call_frame(3, reserved=1),
            call_frame(4, reserved=0),
        )
        calls = calls_of(session)
        assert [call.tenant for call in calls] == [cave, mountain, cave, ANONYMOUS]
        assert not ANONYMOUS.scopes


def test_calls_for_a_tenant_that_was_not_announced_end_the_session() -> None:
    with session_and_caller(rules(*KEYS), greet=False) as (session, caller):
        greet(caller, door=True, secret=SECRET)
        caller.send(announced(1, "cave", "read"), call_frame(1, reserved=2))
        assert calls_of(session) == []
        assert "tenant field of CALL 1 is 2" in session.ended


@pytest.mark.parametrize("keys", [(), KEYS], ids=["open", "keys"])
def test_only_a_door_calls_for_other_tenants(keys: tuple[Key, ...]) -> None:
    with session_and_caller(rules(*keys), greet=False) as (session, caller):
        greet(caller, key="open sesame")
        caller.send(announced(1, "mountain", "read"), call_frame(reserved=1))
        assert calls_of(session) == []
        assert "TENANT from a caller that is no door" in session.ended


@pytest.mark.parametrize(
    ("announcement", "detail"),
    [
        (
            {"number": 0, "namespace": "a", "scopes": ["read"]},
            "number in TENANT: must be greater than",
        ),
        ({"number": 65536, "namespace": "a", "scopes": ["read"]}, "number in TENANT: must be less"),
        ({"number": 1, "namespace": "a/b", "scopes": ["read"]}, "namespace 'a/b'"),
        ({"number": 1, "namespace": "a", "scopes": ["all"]}, "scope 'all'"),
        ({"number": 1, "namespace": "a", "scopes": []}, "no scope"),
        ({"number": 1, "namespace": "a", "scopes": "read"}, "scopes in TENANT: must be a list"),
        ({"number": 1, "scopes": ["read"]}, "namespace in TENANT: must be given"),
        ({"namespace": "a", "scopes": ["read"]}, "number in TENANT: must be given"),
    ],
)
def test_a_door_that_announces_nonsense_is_refused(
    announcement: dict[str, Any], detail: str
) -> None:
    with session_and_caller(rules(), greet=False) as (session, caller):
        greet(caller, door=True, secret=SECRET)
        caller.send(f.frame(f.TENANT, json.dumps(announcement).encode()))
        assert session.read() == []
        assert detail in session.ended


def test_an_unknown_route_is_reported_to_any_tenant() -> None:
    with session_and_caller(rules(*KEYS), greet=False) as (session, caller):
        greet(caller, key="open sesame")
        assert session.read() == []
        list(caller.receive())
        caller.send(call_frame(route=99))
        assert session.read() == []
        assert problem_of(caller.answers()[0])["code"] == "not_found"
