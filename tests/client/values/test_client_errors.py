"""The exception tree against the service's own table of errors."""

from __future__ import annotations

import pickle

import pytest
from attnd import InterruptedExport, Retries, errors

from service import errors as service
from service.errors import KINDS as SERVICE_KINDS
from service.errors import problem as service_problem
from tests.client.client_stub import Script, Scripted, ask, problem


def caught(error: Exception, headers: dict[str, str] | None = None) -> errors.ServiceError:
    """The exception of a client for an error of the service."""
    document = service_problem(error)
    status, code = document.pop("status"), document.pop("code")
    script = Script(problem(status, code, headers or {}, **document))
    with pytest.raises(errors.ServiceError) as info:
        ask("sync", script, "info", retries=Retries(0))
    return info.value


def test_every_code_of_the_service_has_its_class_here_and_none_is_left_over() -> None:
    assert set(errors.ERRORS) == {kind.code for kind in SERVICE_KINDS.values()}


@pytest.mark.parametrize("code", list(errors.ERRORS))
def test_each_code_raises_its_class(code: str) -> None:
    status = next(kind.status for kind in SERVICE_KINDS.values() if kind.code == code)
    with pytest.raises(errors.ERRORS[code]) as info:
        ask("sync", Script(problem(status, code)), "info", retries=Retries(0))
    assert info.value.status == status
    assert info.value.detail == "what happened"


MEMBERS: list[tuple[service.AttndError, dict[str, object]]] = [
    (service.UnknownSequence(["a", "b"]), {"sequences": ("a", "b")}),
    (service.SequenceExists(["a"]), {"sequences": ("a",)}),
    (service.LengthMismatch({"a": 3, "b": 0}), {"lengths": {"a": 3, "b": 0}}),
    (
        service.OutOfPages(12, 3, 64, {"referenced": 61}),
        {"needed": 12, "free": 3, "total": 64, "held": {"referenced": 61}},
    ),
    (service.UnknownLease("lease-1"), {"lease": "lease-1"}),
    (service.UnknownPage("0" * 32), {"page_key": "0" * 32}),
    (service.KeyMismatch(3, "it is committed under another name"), {"page": 3}),
    (service.LostSequence(["a"]), {"sequences": ("a",)}),
    (service.OutOfSequences(3, 1, 2), {"needed": 3, "free": 1, "total": 2}),
    (service.AnswerTooLarge(9, 8, "ask for less"), {"size": 9, "limit": 8}),
    (
        service.InvalidRequest("q", [1, 2], "must have 3 dimensions"),
        {"field": "q", "value": "[1, 2]", "rule": "must have 3 dimensions"},
    ),
    (service.BodyTooLarge("too large", size=10, limit=5), {"size": 10, "limit": 5}),
    (
        service.UnsupportedMediaType("text/plain", supported=["application/json"]),
        {"supported": ("application/json",)},
    ),
    (service.MethodNotAllowed("GET", allow=["POST"]), {"allow": ("POST",)}),
]


@pytest.mark.parametrize(("error", "members"), MEMBERS)
def test_the_numbers_of_each_error_are_attributes(
    error: service.AttndError, members: dict[str, object]
) -> None:
    found = caught(error)
    assert type(found) is getattr(errors, type(error).__name__)
    assert {name: getattr(found, name) for name in members} == members
    assert str(members.get("rule", "")) in str(found)


@pytest.mark.parametrize(("error", "members"), MEMBERS)
def test_an_error_leaves_a_process_pool_with_its_numbers(
    error: service.AttndError, members: dict[str, object]
) -> None:
    found = caught(error, {"x-request-id": "r9", "server-timing": "queue;dur=3"})
    again = pickle.loads(pickle.dumps(found))
    assert (type(again), str(again), again.meta) == (type(found), str(found), found.meta)
    assert {name: getattr(again, name) for name in members} == members


def test_an_interrupted_export_leaves_a_process_pool_too() -> None:
    found = InterruptedExport(17, "9 bytes expected")
    again = pickle.loads(pickle.dumps(found))
    assert (type(again), str(again), again.begin) == (InterruptedExport, str(found), 17)


def test_the_request_id_and_the_timings_are_on_errors_too() -> None:
    headers = {"x-request-id": "r9", "server-timing": "queue;dur=3", "retry-after": "1"}
    error = caught(service.Overloaded("full", retry_after_s=1), headers)
    assert isinstance(error, errors.Overloaded)
    assert error.request_id == "r9"
    assert error.timings == {"queue": 0.003}
    assert error.retry_after_s == 1.0


def test_fields_that_a_later_service_adds_stay_in_the_problem() -> None:
    error = caught(service.MalformedBody("truncated", at=17))
    assert error.problem["at"] == 17


def test_an_error_page_of_something_in_between_keeps_its_status() -> None:
    page = Scripted(502, b"<html>", {"content-type": "text/html"})
    with pytest.raises(errors.ServiceError, match="502") as info:
        ask("sync", Script(page), "info")
    assert (info.value.status, info.value.code) == (502, "")


def test_a_code_of_a_later_service_is_a_plain_service_error() -> None:
    with pytest.raises(errors.ServiceError) as info:
        ask("sync", Script(problem(418, "teapot")), "info")
    assert type(info.value) is errors.ServiceError
