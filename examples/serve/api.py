"""OpenAI's HTTP API over a scheduler. In vLLM and SGLang: the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from jinja2 import TemplateError
from pydantic import BaseModel, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException

from examples.serve.admission import Admission, problem
from examples.serve.answers import Delta, Sampling
from examples.serve.scheduler import Scheduler
from examples.serve.text import PromptReader

PAGE: Final = Path(__file__).with_name("page.html")
POLL_S: Final = 0.1
MOST_BYTES: Final = 2**20
AT_ONCE: Final = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
"""Reverse proxies pass each token on."""
"""Of a request's body: far more text than the model takes would hold up others."""
BODY_S: Final = 10.0
"""In which a body must come: a request that waits for its body keeps another one out."""
NOT_SERVED: Final = """tools functions response_format logit_bias presence_penalty
    frequency_penalty suffix echo"""
"""OpenAI's fields that would change an answer, and that the engine would ignore."""
Stop = Annotated[str, Field(max_length=256)]


class Part(BaseModel, strict=True):
    type: Literal["text"]
    text: str


class Message(BaseModel, strict=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None

    def plain(self) -> dict[str, str]:
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts or ())
        return {"role": self.role, "content": text}


class Body(BaseModel, strict=True):
    """What both endpoints take; unknown fields are ignored."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=16)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63 - 16)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: dict[str, bool | None] | None = None

    @model_validator(mode="before")
    @classmethod
    def known(cls, given: Any) -> Any:
        """Only fields that are served, without null ones."""
        if not isinstance(given, dict):
            return given
        for name in given.keys() & NOT_SERVED.split():
            if given[name] and given[name] != {"type": "text"}:
                raise ValueError(f"{name} is not served here")
        return {name: value for name, value in given.items() if value is not None}


class ChatBody(Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)


class CompletionBody(Body):
    prompt: str | list[int]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: None = None  # only chats have them


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its public name; `max_tokens` of prompt and answer together."""

    name: str
    tokenizer: Any
    prompts: PromptReader
    max_tokens: int

    def check_name(self, name: str) -> None:
        if name != self.name:
            raise HTTPException(404, f"model {name!r} does not exist; {self.name!r} does")


class Run:
    """A request in the scheduler, and what came of its answers so far."""

    def __init__(self, scheduler: Scheduler, model: Model, prompt: list[int], body: Body) -> None:
        chat = isinstance(body, ChatBody)
        asked = (body.max_completion_tokens if chat else None) or body.max_tokens
        room = model.max_tokens - len(prompt)
        model.check_name(body.model)
        if not prompt or max(prompt) >= len(model.tokenizer) or min(prompt) < 0:
            raise HTTPException(400, "the prompt must have tokens, all of them in the vocabulary")
        if room < (asked or 1):
            sizes = f"the prompt has {len(prompt)} tokens and the answer may have {asked or 1}"
            raise HTTPException(400, f"{sizes}: the model takes {model.max_tokens} in all")
        stop = tuple(filter(None, [body.stop] if isinstance(body.stop, str) else body.stop or ()))
        top = body.top_logprobs if chat and body.logprobs else None
        sampling = Sampling(asked or room, body.temperature, body.top_p, body.seed, stop, top)
        self._model, self._scheduler, self._chat = model, scheduler, chat
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self._kind = "chat.completion" if chat else "text_completion"
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        loop = asyncio.get_running_loop()

        def emit(delta: Delta) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._deltas.put_nowait, delta)

        self._request = scheduler.submit(prompt, sampling, body.n, emit)
        self._answers = [Delta(index) for index in range(body.n)]

    async def deltas(self) -> AsyncIterator[Delta]:
        """Until every answer is over; whatever ends this early cancels the request."""
        try:
            while any(answer.finish is None for answer in self._answers):
                delta = await self._deltas.get()
                if delta.error is not None:
                    raise HTTPException(503, delta.error)
                self._answers[delta.index] += delta
                yield delta
        finally:
            self._scheduler.cancel(self._request)

    async def whole(self) -> dict[str, Any]:
        """The reply when all answers are over."""
        async for _ in self.deltas():
            pass
        choices = [self._choice(answer, "message") for answer in self._answers]
        return self._document(self._kind, choices) | {"usage": self._usage()}

    async def events(self, options: dict[str, bool | None]) -> AsyncIterator[str]:
        """The reply as server-sent events."""
        kind = f"{self._kind}.chunk" if self._chat else self._kind
        try:
            async for delta in self.deltas():
                if delta.text or delta.finish or delta.logprobs:
                    yield event(self._document(kind, [self._choice(delta, "delta")]))
        except HTTPException as error:
            yield event(problem(error.status_code, str(error.detail)))
            return
        if options.get("include_usage"):
            yield event(self._document(kind, []) | {"usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _document(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id, "created": self._created, "model": self._model.name}
        return {**head, "object": kind, "choices": choices}

    def _choice(self, delta: Delta, name: str) -> dict[str, Any]:
        choice = {"index": delta.index, "finish_reason": delta.finish, "logprobs": None}
        if not self._chat:
            return choice | {"text": delta.text}
        if delta.logprobs:
            rows = [
                self._token(one.token, one.logprob)
                | {"top_logprobs": [self._token(*pair) for pair in one.top]}
                for one in delta.logprobs
            ]
            choice["logprobs"] = {"content": rows}
        return choice | {name: {"role": "assistant", "content": delta.text}}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._model.tokenizer.decode([token])
        known = None if "\ufffd" in text else list(text.encode())  # null: part of a character
        return {"token": text, "logprob": logprob, "bytes": known}

    def _usage(self) -> dict[str, Any]:
        prompt, made = len(self._request.prompt), sum(one.tokens for one in self._answers)
        counts = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        return counts | {"prompt_tokens_details": {"cached_tokens": self._request.cached_tokens}}


def create_app(scheduler: Scheduler, model: Model, live_url: str, admission: Admission) -> Any:
    """The API and the chat page; `live_url` is attnd's live page, which the chat page links to."""
    app = FastAPI(title="examples.serve")

    async def reply(prompt: list[int], body: Body, request: Request) -> Any:
        run = Run(scheduler, model, prompt, body)
        if body.stream:
            events = run.events(body.stream_options or {})
            return StreamingResponse(events, headers=AT_ONCE, media_type="text/event-stream")
        whole = asyncio.create_task(run.whole())
        while not (await asyncio.wait({whole}, timeout=POLL_S))[0]:
            if await request.is_disconnected():
                whole.cancel()
                raise HTTPException(499, "the caller has disconnected")
        return await whole

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await parsed(request, ChatBody)
        messages = [one.plain() for one in body.messages]
        try:  # in a thread: a long text must not hold up other requests
            prompt = await asyncio.to_thread(model.prompts.chat, messages)
        except (TemplateError, ValueError) as error:  # or the model has no template
            raise HTTPException(400, f"messages: {error}") from None
        return await reply(prompt, body, request)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Any:
        body = await parsed(request, CompletionBody)
        prompt = body.prompt
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(model.prompts.text, prompt)
        return await reply(prompt, body, request)

    served = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "attnd"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [served]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        model.check_name(name)
        return served

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "preemptions": scheduler.preemptions}

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        text = PAGE.read_text(encoding="utf-8")
        return text.replace("{{model}}", escape(model.name)).replace("{{live}}", escape(live_url))

    @app.exception_handler(HTTPException)
    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        status, message = getattr(error, "status_code", 500), getattr(error, "detail", "a bug")
        return JSONResponse(problem(status, str(message)), status)

    @app.exception_handler(ValidationError)
    async def invalid(request: Request, error: ValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = str(first["loc"][0]) if first["loc"] else None
        message = first["msg"].removeprefix("Value error, ")
        return JSONResponse(problem(400, f"{param}: {message}" if param else message, param), 400)

    return admission.before(app)


async def parsed(request: Request, kind: type[Body]) -> Any:
    """The body of a request, a `kind`; ValidationError if it is none."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > MOST_BYTES:
                    raise HTTPException(413, f"the body is longer than {MOST_BYTES} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the body took longer than {BODY_S:g} s") from None
    return kind.model_validate_json(data)


def event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"
