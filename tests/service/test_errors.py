"""The error tree: every class has its kind, and a document has the numbers that matter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service import errors
from service.core.errors import CoreError, shorten
from service.errors import KINDS, AttndError, InvalidRequest, kind_of, problem

HELD = {"cached": 1}
NO_PAGES = {"needed": 3, "free": 1, "total": 9, "available": 2, "held": HELD}
SUPPORTED: dict[str, Any] = {"supported": []}
CHANGED = {"sequences": ["a"], "generation": "0f"}
RETURNED = {"sequences": ["a"], "group": 1, "window": 6, "first": 3, "kept": 8}
PARTS = {"part": 3, "next_part": 1, "num_parts": 4}
DIGESTS = {"of": "part 3", "given": "0f", "found": "1f"}
EXAMPLES: list[tuple[AttndError, int, str, dict[str, Any]]] = [
    (errors.MalformedBody("x"), 400, "malformed_body", {}),
    (errors.MalformedRequest("x"), 400, "malformed_request", {}),
    (errors.Unauthorized("x"), 401, "unauthorized", {}),
    (errors.Forbidden("x", scope="read"), 403, "forbidden", {"scope": "read"}),
    (errors.NoSuchRoute("x"), 404, "not_found", {}),
    (errors.UnknownSequence(("a", "b")), 404, "unknown_sequence", {"sequences": ["a", "b"]}),
    (errors.MethodNotAllowed("x", ["GET"]), 405, "method_not_allowed", {"allow": ["GET"]}),
    (errors.RequestTimeout("x"), 408, "request_timeout", {}),
    (errors.SequenceExists(("a",)), 409, "sequence_exists", {"sequences": ["a"]}),
    (errors.LengthMismatch({"a": 2}), 409, "length_mismatch", {"lengths": {"a": 2}}),
    (errors.BodyTooLarge("x", size=9, limit=8), 413, "body_too_large", {"size": 9, "limit": 8}),
    (errors.AnswerTooLarge(9, 8, "x"), 413, "answer_too_large", {"size": 9, "limit": 8}),
    (errors.UnsupportedMediaType("x", supported=[]), 415, "unsupported_media_type", SUPPORTED),
    (InvalidRequest("a", 2, "b"), 422, "invalid_request", {"field": "a", "value": 2, "rule": "b"}),
    (errors.Overloaded("x", retry_after_s=1.0), 429, "overloaded", {"retry_after_s": 1.0}),
    (errors.HeadersTooLarge("x"), 431, "headers_too_large", {}),
    (errors.Cancelled("x"), 499, "cancelled", {}),
    (errors.Internal("x"), 500, "internal", {}),
    (errors.NotErased("x"), 500, "not_erased", {}),
    (errors.NotSupported("x"), 501, "not_supported", {}),
    (errors.NotReady("x"), 503, "not_ready", {}),
    (errors.DeadlineExceeded("x"), 504, "deadline_exceeded", {}),
    (errors.OutOfPages(3, 1, 9, HELD, 2), 507, "out_of_pages", NO_PAGES),
    (errors.UnknownLease("lease-1"), 404, "unknown_lease", {"lease": "lease-1"}),
    (errors.UnknownPage("ab"), 404, "unknown_page", {"page_key": "ab"}),
    (errors.KeyMismatch(3, "it has another"), 409, "key_mismatch", {"page": 3}),
    (errors.UnknownImport("a"), 404, "unknown_import", {"sequences": ["a"]}),
    (errors.WindowReturned("a", 1, 6, 3, 8), 409, "window_returned", RETURNED),
    (errors.SequenceChanged("a", "0f"), 409, "sequence_changed", CHANGED),
    (errors.ImportExists("a"), 409, "import_exists", {"sequences": ["a"]}),
    (errors.PartMismatch(3, 1, 4), 409, "part_mismatch", PARTS),
    (errors.DigestMismatch("part 3", "0f", "1f"), 422, "digest_mismatch", DIGESTS),
    (errors.LostSequence(["a"]), 410, "lost_sequence", {"sequences": ["a"]}),
    (errors.OutOfSequences(3, 2, 9), 507, "out_of_sequences", {"needed": 3, "free": 2, "total": 9}),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example[2])
def test_a_problem_has_status_code_and_numbers(
    example: tuple[AttndError, int, str, dict[str, Any]],
) -> None:
    error, status, code, numbers = example
    document = problem(error)
    assert (document["status"], document["code"]) == (status, code)
    assert document["type"] == f"urn:attnd:error:{code}"
    assert document["detail"] == str(error) and document["title"]
    assert document.keys() - {"type", "title", "status", "detail", "code"} == numbers.keys()
    assert numbers.items() <= document.items()
    json.dumps(document, allow_nan=False)


def test_every_class_has_a_kind_of_its_own_and_an_example() -> None:
    bases = AttndError, CoreError
    classes = {cls for base in bases for cls in base.__subclasses__()} - {CoreError}
    classes = {cls for cls in classes if cls.__module__ in (errors.__name__, CoreError.__module__)}
    assert classes == set(KINDS) == {type(example[0]) for example in EXAMPLES}
    assert len({kind.code for kind in KINDS.values()}) == len(KINDS)


def test_a_subclass_is_of_its_parents_kind() -> None:
    class DoesNotFit(errors.AnswerTooLarge):
        pass

    assert kind_of(DoesNotFit(2, 1, "x")).code == "answer_too_large"


def test_an_unknown_error_is_internal_and_reveals_nothing() -> None:
    document = problem(ZeroDivisionError("a secret"))
    assert document["code"] == "internal" and "secret" not in json.dumps(document)


@pytest.mark.parametrize("value", [None, True, 3, -(2**62), 0.5, "text", "x" * 200])
def test_short_values_are_shown_as_they_are(value: object) -> None:
    assert shorten(value) == value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([1, "a"], "[1, 'a']"),
        ("x" * 201, "x" * 197 + "..."),
        (float("inf"), "inf"),
        (2**70, str(2**70)),
        (2**16609, "an integer of 16610 bits"),
    ],
    ids=["list", "text", "infinity", "long integer", "endless integer"],
)
def test_other_values_are_reported_in_at_most_200_characters(value: object, shown: str) -> None:
    assert shorten(value) == shown


@pytest.mark.parametrize(
    "value", [[[1] * 10**6] * 50, {i: [i] * 99 for i in range(10**5)}], ids=["list", "object"]
)
def test_of_a_large_value_only_the_beginning_is_read(value: object) -> None:
    shown = shorten(value)
    assert isinstance(shown, str) and len(shown) <= 200
    assert len(str(InvalidRequest("field", value, "rule"))) < 250


def test_text_that_is_no_unicode_can_be_logged_and_sent() -> None:
    error = InvalidRequest("tensors.\ud800", "\ud801", "rule")
    assert (error.field, error.value) == ("tensors.\\ud800", "\\ud801")
    json.dumps(problem(error), ensure_ascii=False).encode("utf-8")


@pytest.mark.parametrize(
    ("needed", "remedy"),
    [(9, "delete sequences or raise"), (10, "more than there are: raise")],
)
def test_the_remedy_for_too_few_pages_can_help(needed: int, remedy: str) -> None:
    assert remedy in str(errors.OutOfPages(needed, 1, 9, HELD, 2))
