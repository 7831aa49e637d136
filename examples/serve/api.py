"""OpenAI's HTTP API over a scheduler. In vLLM and SGLang: the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from pydantic import BaseModel, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException

from examples.serve.admission import Admission, problem
from examples.serve.answers import Delta, Sampling
from examples.serve.page import Page
from examples.serve.scheduler import Scheduler
from examples.serve.text import PromptReader

POLL_S: Final = 0.1
MOST_BYTES: Final = 2**20
"""Of a request's body: far more text than the model takes would hold up others."""
AT_ONCE: Final = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
"""Reverse proxies pass each token on."""
BODY_S: Final = 10.0
"""In which a body must come: a request that waits for its body keeps another one out."""
NOT_SERVED: Final = """tools tool_choice functions function_call response_format logit_bias
    presence_penalty frequency_penalty suffix echo best_of audio modalities web_search_options"""
"""OpenAI's fields that would change an answer, and that the engine would ignore."""
NEUTRAL: Final = ({"type": "text"}, ["text"], "none", "auto")
"""Values of these that change nothing, as null, 0, false and empty ones."""
IGNORED: Final = """metadata moderation parallel_tool_calls prediction prompt_cache_key
    prompt_cache_options prompt_cache_retention reasoning_effort safety_identifier service_tier
    store user verbosity"""
"""OpenAI's fields that change no answer of this engine."""
Stop = Annotated[str, Field(max_length=256)]


class Part(BaseModel, strict=True, extra="forbid"):
    type: Literal["text"]
    text: str


class Message(BaseModel, strict=True, extra="forbid"):
    """A message; those of OpenAI's replies are taken as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    def plain(self) -> dict[str, str]:
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts or ())
        return {"role": self.role, "content": text}


class StreamOptions(BaseModel, strict=True, extra="forbid"):
    include_usage: bool = False
    include_obfuscation: bool = False


class Body(BaseModel, strict=True, extra="forbid"):
    """What both endpoints take. Without `max_tokens`, `temperature`, `top_p` and `top_k`: the
    model's own, as `Model.sampling` has them."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    n: int = Field(1, ge=1, le=16)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63 - 16)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="before")
    @classmethod
    def known(cls, given: Any) -> Any:
        """Without null fields, and those of OpenAI's that change nothing here."""
        if not isinstance(given, dict):
            return given
        not_served, ignored = NOT_SERVED.split(), IGNORED.split()
        for name in given.keys() & not_served:
            if given[name] and given[name] not in NEUTRAL:
                raise ValueError(f"{name} is not served here")
        without = {*not_served, *ignored}
        return {k: value for k, value in given.items() if value is not None and k not in without}


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
    """A model by its public name; `max_tokens` of prompt and answer together; `sampling` of
    requests that say nothing of it."""

    name: str
    tokenizer: Any
    prompts: PromptReader
    max_tokens: int
    sampling: Sampling

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
        sampling = replace(
            model.sampling,
            **body.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True),
            max_tokens=asked or min(room, model.sampling.max_tokens),
            seed=body.seed,
            stop=stop,
            top_logprobs=top,
        )
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

    async def events(self, options: StreamOptions) -> AsyncIterator[str]:
        """The reply as server-sent events."""
        kind = f"{self._kind}.chunk" if self._chat else self._kind
        try:
            async for delta in self.deltas():
                if delta.text or delta.finish or delta.logprobs:
                    yield event(self._document(kind, [self._choice(delta, "delta")]))
        except HTTPException as error:
            yield event(problem(error.status_code, str(error.detail)))
            return
        if options.include_usage:
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


def create_app(scheduler: Scheduler, model: Model, page: Page, admission: Admission) -> Any:
    """The API and the chat page."""
    app = FastAPI(title="examples.serve", docs_url=None, redoc_url=None, openapi_url=None)
    app.routes.extend(page.routes())

    async def reply(prompt: list[int], body: Body, request: Request) -> Any:
        run = Run(scheduler, model, prompt, body)
        if body.stream:
            events = run.events(body.stream_options)
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

    @app.exception_handler(HTTPException)
    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        status, message = getattr(error, "status_code", 500), getattr(error, "detail", "a bug")
        return JSONResponse(problem(status, str(message)), status)

    @app.exception_handler(ValidationError)
    async def invalid(request: Request, error: ValidationError) -> JSONResponse:
        return JSONResponse(problem(400, *invalid_field(error)), 400)

    return admission.before(app)


def invalid_field(error: ValidationError) -> tuple[str, str | None, str | None]:
    """Message, parameter and code of OpenAI's error for the first wrong field."""
    errors = error.errors()
    unknown = next((one for one in errors if one["type"] == "extra_forbidden"), None)
    if unknown is not None:
        *inside, last = unknown["loc"]  # unions have names of types in between, as `list[Part]`
        known = [part for part in inside if isinstance(part, int) or part.isidentifier()]
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in [*known, last])
        name = "".join(parts).removeprefix(".")
        return f"Unknown parameter: {name!r}", name, "unknown_parameter"
    param = str(errors[0]["loc"][0]) if errors[0]["loc"] else None
    message = errors[0]["msg"].removeprefix("Value error, ")
    return f"{param}: {message}" if param else message, param, None


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
