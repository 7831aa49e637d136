"""The exception tree against the service's own table of errors."""

from __future__ import annotations

import pytest
from attnd import Retries, errors

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


def test_the_documented_tree_names_every_class() -> None:
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert name in (errors.__doc__ or ""), f"{name} is not in the tree"


@pytest.mark.parametrize("code", list(errors.ERRORS))
def test_each_code_raises_its_class(code: str) -> None:
    status = next(kind.status for kind in SERVICE_KINDS.values() if kind.code == code)
    with pytest.raises(errors.ERRORS[code]) as info:
        ask("sync", Script(problem(status, code)), "info", retries=Retries(0))
    assert info.value.status == status
    assert info.value.detail == "what happened"


def test_the_numbers_of_each_error_are_attributes() -> None:
    unknown = caught(service.UnknownSequence(["a", "b"]))
    assert isinstance(unknown, errors.UnknownSequence)
    assert unknown.sequences == ("a", "b")
    exists = caught(service.SequenceExists(["a"]))
    assert isinstance(exists, errors.SequenceExists)
    assert exists.sequences == ("a",)
    mismatch = caught(service.LengthMismatch({"a": 3, "b": 0}))
    assert isinstance(mismatch, errors.LengthMismatch)
    assert mismatch.lengths == {"a": 3, "b": 0}
    taken = caught(service.SequenceTaken({"a": 7}))
    assert isinstance(taken, errors.SequenceTaken)
    assert taken.epochs == {"a": 7}
    moving = caught(service.SequenceMoving(["a"]))
    assert isinstance(moving, errors.SequenceMoving)
    assert moving.sequences == ("a",)
    pages = caught(service.OutOfPages(12, 3, 64, {"referenced": 61}))
    assert isinstance(pages, errors.OutOfPages)
    assert (pages.needed, pages.free, pages.total) == (12, 3, 64)
    assert pages.held == {"referenced": 61}
    lease = caught(service.UnknownLease("lease-1"))
    assert isinstance(lease, errors.UnknownLease)
    assert lease.lease == "lease-1"
    page = caught(service.UnknownPage("0" * 32))
    assert isinstance(page, errors.UnknownPage)
    assert page.page_key == "0" * 32
    name = caught(service.KeyMismatch(3, "it is committed under another name"))
    assert isinstance(name, errors.KeyMismatch)
    assert name.page == 3
    lost = caught(service.LostSequence(["a"]))
    assert isinstance(lost, errors.LostSequence)
    assert lost.sequences == ("a",)
    sequences = caught(service.OutOfSequences(3, 1, 2))
    assert isinstance(sequences, errors.OutOfSequences)
    assert (sequences.needed, sequences.free, sequences.total) == (3, 1, 2)
    answer = caught(service.AnswerTooLarge(9, 8, "ask for less"))
    assert isinstance(answer, errors.AnswerTooLarge)
    assert (answer.size, answer.limit) == (9, 8)
    invalid = caught(service.InvalidRequest("q", [1, 2], "must have 3 dimensions"))
    assert isinstance(invalid, errors.InvalidRequest)
    assert (invalid.field, invalid.rule) == ("q", "must have 3 dimensions")
    assert invalid.value == "[1, 2]"
    assert "must have 3 dimensions" in str(invalid)
    large = caught(service.BodyTooLarge("too large", size=10, limit=5))
    assert isinstance(large, errors.BodyTooLarge)
    assert (large.size, large.limit) == (10, 5)
    media = caught(service.UnsupportedMediaType("text/plain", supported=["application/json"]))
    assert isinstance(media, errors.UnsupportedMediaType)
    assert media.supported == ("application/json",)
    method = caught(service.MethodNotAllowed("GET", allow=["POST"]))
    assert isinstance(method, errors.MethodNotAllowed)
    assert method.allow == ("POST",)


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
