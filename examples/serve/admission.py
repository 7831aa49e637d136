"""Who may call, and how many at once. In vLLM and SGLang: options of the server, or a gateway.

A browser on this machine can call any port of it on behalf of any site. Such requests have a
foreign name in `Host` or `Origin`, and are rejected, as attnd itself does.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Any, Final

from fastapi.responses import JSONResponse

Asgi = Callable[[Any, Any, Any], Awaitable[None]]
NAME: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._~-]+)(:[0-9]{1,5})?")


class Admission:
    """At most `most` requests run and wait. A server at `host` of this machine alone has its names
    of loopback and those `allowed`; another one has any, but pages of its own only."""

    def __init__(self, host: str, allowed: list[str], most: int) -> None:
        self.allowed, self.most, self.count = {one.lower() for one in allowed}, most, 0
        self._is_open = not (is_loopback(host) or allowed)

    def before(self, app: Asgi) -> Asgi:
        """The application, for admitted requests only."""

        async def admitted(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            is_counted = scope["method"] == "POST"
            status, message = self.refusal(dict(scope["headers"]))
            if not message and is_counted and self.count >= self.most:
                status, message = 429, f"{self.most} requests run or wait: try again in a second"
            if message:
                retry = {"Retry-After": "1"} if status == 429 else None
                response = JSONResponse(problem(status, message), status, retry)
                return await response(scope, receive, send)
            self.count += is_counted
            try:
                await app(scope, receive, send)
            finally:
                self.count -= is_counted

        return admitted

    def refusal(self, headers: dict[bytes, bytes]) -> tuple[int, str]:
        """Status and message for a request with a foreign `Host` or `Origin`, else an empty one."""
        host, origin = (
            headers.get(name, b"").decode("latin-1").lower() for name in (b"host", b"origin")
        )
        if host and (name := NAME.fullmatch(host)) is None:
            return 400, f"Host is {host[:100]!r}: send a host name and a port"
        if host and not self._is_open and not self.has(name[1]):
            return 403, f"Host is {host[:100]!r}: to allow it, add --allowed-host"
        netloc = origin.partition("://")[2]
        page = NAME.fullmatch(netloc)
        if origin and netloc != host and (page is None or page[1].strip("[]") not in self.allowed):
            return 403, f"Origin is {origin[:100]!r}: to allow it, add --allowed-host"
        return 200, ""

    def has(self, name: str) -> bool:
        bare = name.strip("[]").rstrip(".")
        return bare in self.allowed or is_loopback(bare)


def is_loopback(name: str) -> bool:
    try:
        return name == "localhost" or name.endswith(".localhost") or ip_address(name).is_loopback
    except ValueError:
        return False


def problem(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error document."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:
        code = "rate_limit_exceeded"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
