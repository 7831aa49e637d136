"""One call of the gRPC door: its metadata and its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Final

import grpc
from attnd.wire.frames import NO_STAGES

from service.doors.kit.headers import call_id_of, request_id_of, server_timing, traceparent_of
from service.doors.oip.models import error_text
from service.image.json_text import dump_json
from service.tenants import ANONYMOUS

SERVICE: Final = "/inference.GRPCInferenceService"
PROBLEM_KEY: Final = "attnd-problem"
"""The trailing metadata's key for the problem document."""
LONGEST_PROBLEM: Final = 4096
"""In characters; a longer one could exceed clients' limits on metadata."""
LONGEST_TEXT: Final = 2048
CODES: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    410: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.OUT_OF_RANGE,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.UNAVAILABLE,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""gRPC's codes by HTTP's statuses; INTERNAL for others."""


class Rpc:
    """A call's metadata and outcome; a stream has one for each request."""

    def __init__(self, context: Any, method: str) -> None:
        self.started = perf_counter()
        self.context = context
        self.method = method
        self.path = f"{SERVICE}/{method}"
        self.op = "unknown"
        self.status = 200
        self.code = "ok"
        self.seconds = 0.0
        self.stages: Sequence[float] = NO_STAGES
        self.peer = str(context.peer())
        self.metadata = dict(context.invocation_metadata() or ())
        self.request_id = request_id_of(self.given("x-request-id"))
        self.traceparent = traceparent_of(self.given("traceparent"))
        self.tenant = ANONYMOUS

    def given(self, name: str) -> bytes:
        """A value of the metadata; empty if it is missing."""
        value = self.metadata.get(name, "")
        return value.encode("latin-1", "replace") if isinstance(value, str) else bytes(value)

    @property
    def call_id(self) -> bytes:
        """The request id as the road has it."""
        return call_id_of(self.request_id)

    @property
    def trailing(self) -> tuple[tuple[str, str], ...]:
        """The trailing metadata of every response."""
        timing = server_timing(self.stages).decode("ascii")
        return ("x-request-id", self.request_id.decode("ascii")), ("server-timing", timing)

    def deadline_us(self, wanted: int) -> int:
        """The operation's time limit: the shorter of gRPC's deadline and `wanted` (the request's
        parameter); 0 for none."""
        left = self.context.time_remaining()
        limits = [wanted] if wanted else []
        if left is not None:
            limits.append(max(1, int(min(left, 3600.0) * 1e6)))
        return min(limits, default=0)

    def end(self, status: int = 200, code: str = "ok") -> None:
        self.status, self.code = status, code
        self.seconds = perf_counter() - self.started


def status_of(problem: Mapping[str, Any]) -> tuple[grpc.StatusCode, str]:
    """A problem as gRPC's status and its text."""
    code = CODES.get(problem["status"], grpc.StatusCode.INTERNAL)
    if problem["code"] == "sequence_exists":
        code = grpc.StatusCode.ALREADY_EXISTS
    return code, error_text(problem)[:LONGEST_TEXT]


def problem_metadata(problem: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The problem document as trailing metadata, unless it is too long."""
    text = dump_json(problem)
    return ((PROBLEM_KEY, text),) if len(text) <= LONGEST_PROBLEM else ()
