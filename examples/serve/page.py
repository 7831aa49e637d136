"""The chat page: its files, those of attnd's live page that draw the prefix tree, and the tree.

In vLLM and SGLang there is none: Open WebUI and others are programs of their own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, Final

from attnd import AttndError, Snapshot
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from examples.serve.answers import Sampling

OWN: Final = Path(__file__).with_name("page")
LIVE: Final = Path(__file__).resolve().parents[2] / "service/doors/http/live/files"
TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
SAFE: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
PERIOD_S: Final = 0.4
"""All pages together look at the pool once in this time."""
COLUMNS: Final = ("parents", "pages", "totals", "sequences", "idle_s", "states")


class Page:
    """The page's routes. `look` takes a snapshot of attnd's pool."""

    def __init__(
        self, model: str, live_url: str, sampling: Sampling, look: Callable[[], Snapshot]
    ) -> None:
        facts = {"model": model, "live": live_url, "max_tokens": sampling.max_tokens}
        facts |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        text = (OWN / "chat.html").read_text(encoding="utf-8")
        self._html = text.replace("{{facts}}", escape(json.dumps(facts)))
        self._look, self._lock = look, asyncio.Lock()
        self._tree: dict[str, Any] = {}
        self._until = 0.0

    def routes(self) -> list[Route]:
        return [
            Route("/", self._index),
            Route("/page/{name}", self._file_of(OWN)),
            Route("/live/{name}", self._file_of(LIVE)),
            Route("/tree", self._newest),
        ]

    async def _index(self, request: Request) -> Response:
        return Response(self._html, headers=SAFE, media_type="text/html")

    def _file_of(self, folder: Path) -> Callable[[Request], Any]:
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in TYPES}

        async def file(request: Request) -> Response:
            name = request.path_params["name"]
            if name not in files:
                raise HTTPException(404, f"{request.url.path}: there is no such file")
            return Response(files[name], headers=SAFE, media_type=TYPES[Path(name).suffix])

        return file

    async def _newest(self, request: Request) -> Response:
        """The pool's counts and its prefix tree, as attnd's live page has them; 503 without."""
        async with self._lock:
            if time.monotonic() >= self._until:
                try:
                    self._tree = tree_of(await asyncio.to_thread(self._look))
                except (AttndError, OSError, RuntimeError) as error:
                    self._tree = {"error": str(error)}
                self._until = time.monotonic() + PERIOD_S
        return JSONResponse(self._tree, 503 if "error" in self._tree else 200, SAFE)


def tree_of(found: Snapshot) -> dict[str, Any]:
    pool = {name: getattr(found, name) for name in ("total", "free", "cached", "nodes")}
    columns = {name: getattr(found.tree, name).tolist() for name in COLUMNS}
    return {"pool": pool, "namespaces": found.tree.namespaces, **columns}
