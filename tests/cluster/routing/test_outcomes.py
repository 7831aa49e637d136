"""Each error of an engine has the outcome that the table of outcomes gives it."""

from __future__ import annotations

import json

import pytest

from service.cluster.routing.outcomes import Outcome, outcome_of, unknown_ids
from service.doors.kit.problems import ProblemText
from service.errors import NotReady, Overloaded
from service.road.caller_end.caller import AnswerLost


def problem(status: int, code: str, **more: object) -> ProblemText:
    return ProblemText(json.dumps({"status": status, "code": code, **more}))


UNKNOWN = problem(404, "unknown_sequence", sequences=["a", "b"])
ERRORS = [
    (UNKNOWN, Outcome.UNKNOWN),
    (problem(404, "unknown_sequence", sequences=["a"], done=["b"]), Outcome.REFUSED),
    (problem(404, "unknown_lease"), Outcome.REFUSED),
    *((problem(status, "any"), Outcome.FULL) for status in (429, 503, 507)),
    *((problem(status, "any", done=["a"]), Outcome.REFUSED) for status in (429, 503, 507)),
    *((problem(status, "any"), Outcome.REFUSED) for status in (409, 410, 422, 500, 504)),
    (Overloaded("full", retry_after_s=1.0), Outcome.FULL),
    (NotReady("the session ended"), Outcome.LOST),
    (AnswerLost("the session ended"), Outcome.LOST),
    (ValueError("a bug"), Outcome.REFUSED),
]


@pytest.mark.parametrize(("error", "outcome"), ERRORS)
def test_an_error_has_its_outcome(error: Exception, outcome: Outcome) -> None:
    assert outcome_of(error) is outcome
    assert unknown_ids(error) == (["a", "b"] if error is UNKNOWN else [])
