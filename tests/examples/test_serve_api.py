"""What examples/serve makes of a request: fields, defaults, OpenAI's errors, and its page."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from attnd import AttndError
from attnd.wire.answers import Snapshot, SnapshotTree
from transformers import GenerationConfig

from examples.serve import launch, page
from examples.serve.admission import Admission
from examples.serve.answers import Delta, Sampling
from examples.serve.api import Model, create_app
from examples.serve.sampler import choose

OWN = Sampling(64, temperature=0.6, top_p=0.9, top_k=20)
ROOM = 100
USER = {"role": "user", "content": "Hello"}


class Scheduler:
    """Answers every request with one word, and keeps how it was to be sampled."""

    def __init__(self) -> None:
        self.sampling: list[Sampling] = []

    def submit(
        self, prompt: list[int], sampling: Sampling, count: int, emit: Callable[[Delta], None]
    ) -> Any:
        self.sampling.append(sampling)
        for index in range(count):
            emit(Delta(index, "word", 1, finish="stop"))
        return SimpleNamespace(prompt=prompt, cached_tokens=0)

    def cancel(self, request: Any) -> None:
        """It has ended."""


def no_attnd() -> Snapshot:
    raise AttndError("no engine at /socket")


class Server:
    def __init__(self, look: Callable[[], Snapshot] = no_attnd) -> None:
        self.scheduler = Scheduler()
        prompts: Any = SimpleNamespace(chat=lambda messages: [1] * 40, text=lambda text: [1] * 40)
        served = Model("m", range(9), prompts, ROOM, OWN)
        chat = page.Page("m</script>", "http://127.0.0.1:1/live", OWN, look)
        app = create_app(self.scheduler, served, chat, Admission("localhost", [], 9))  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def post(self, path: str = "chat/completions", **fields: Any) -> httpx.Response:
        given = {"model": "m"} | ({"messages": [USER]} if "chat" in path else {"prompt": "x"})
        return await self.client.post(f"/v1/{path}", json=given | fields)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperatur": 0}, "temperatur"),
        ({"max_token": None, "maxtokens": 3}, "maxtokens"),
        ({"messages": [USER | {"contents": "x"}]}, "messages[0].contents"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "", "txt": ""}]}]},
         "messages[0].content[0].txt"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ],
)  # fmt: skip
async def test_a_field_that_does_not_exist_is_refused(fields: dict[str, Any], name: str) -> None:
    reply = await Server().post(**fields)
    error = {"message": f"Unknown parameter: {name!r}", "type": "invalid_request_error"}
    assert reply.status_code == 400
    assert reply.json()["error"] == error | {"param": name, "code": "unknown_parameter"}


async def test_fields_that_change_nothing_are_taken_and_others_refused() -> None:
    server, name = Server(), "of a field that would change the answer"
    neutral: dict[str, Any] = {"user": "me", "store": True, "tools": [], "presence_penalty": 0}
    neutral |= {"response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "auto"}
    assert (await server.post(**neutral)).status_code == 200
    for name, value in {"tools": [{}], "tool_choice": "required", "echo": True}.items():
        reply = await server.post(**{name: value})
        assert reply.status_code == 400 and f"{name} is not served here" in reply.text
    assert len(server.scheduler.sampling) == 1, name


@pytest.mark.parametrize(
    ("path", "fields", "sampling"),
    [
        ("chat/completions", {}, (60, 0.6, 0.9, 20)),  # what the prompt leaves of ROOM
        ("chat/completions", {"max_tokens": None, "temperature": None}, (60, 0.6, 0.9, 20)),
        ("chat/completions", {"temperature": 0, "max_tokens": 5}, (5, 0, 0.9, 20)),
        ("chat/completions", {"max_completion_tokens": 7, "top_p": 1, "top_k": 0}, (7, 0.6, 1, 0)),
        ("completions", {}, (16, 0.6, 0.9, 20)),
    ],
)
async def test_what_a_request_leaves_open_is_the_models_own(
    path: str, fields: dict[str, Any], sampling: tuple[int, float, float, int]
) -> None:
    server = Server()
    assert (await server.post(path, **fields)).status_code == 200
    (used,) = server.scheduler.sampling
    assert (used.max_tokens, used.temperature, used.top_p, used.top_k) == sampling


@pytest.mark.parametrize(
    ("config", "sampling"),
    [
        ({}, Sampling(9, temperature=0.0)),
        ({"temperature": 0.7}, Sampling(9, temperature=0.0)),
        ({"do_sample": True}, Sampling(9, 1.0, 1.0)),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
            Sampling(9, 0.7, 0.8, 20),
        ),
    ],
)
def test_the_models_own_sampling_is_that_of_generate(
    config: dict[str, Any], sampling: Sampling
) -> None:
    assert launch.recommended(GenerationConfig(**config), 9) == sampling


def test_top_k_leaves_the_most_likely_tokens() -> None:
    logits, generator = torch.tensor([1.0, 3.0, 0.0, 2.9, 2.0]), torch.Generator().manual_seed(1)
    for k, tokens in ((0, {0, 1, 2, 3, 4}), (1, {1}), (3, {1, 3, 4}), (9, {0, 1, 2, 3, 4})):
        sampling = Sampling(1, temperature=2.0, top_k=k)
        assert {choose(logits, sampling, generator) for _ in range(300)} == tokens


async def test_the_page_and_its_files_come_with_a_strict_policy() -> None:
    client = Server().client
    index = await client.get("/")
    assert "m&lt;/script&gt;" in index.text and "{{" not in index.text
    paths = ["/", "/page/chat.js", "/page/markdown.js", "/live/tree.js", "/live/colours.css"]
    for path in paths:
        reply = await client.get(path)
        policy = reply.headers["content-security-policy"]
        assert reply.status_code == 200
        assert "default-src 'none'" in policy and "unsafe" not in policy
        for word in ("innerHTML", "insertAdjacentHTML", "eval(", " style=", "onclick", "//cdn"):
            assert word not in reply.text, f"{path} has {word}"
    for path in ("/page/chat.html", "/page/none.js", "/live/live.html", "/page/..%2fapi.py"):
        assert (await client.get(path)).status_code == 404, path


async def test_the_tree_is_taken_once_for_all_pages_and_a_failure_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page, "PERIOD_S", 60.0)
    taken = []

    def look() -> Snapshot:
        taken.append(1)
        column = torch.tensor([-1, 0]).numpy()
        tree = SnapshotTree(("default",), *[column] * 6)
        return Snapshot(7, 3, 2, 0, 10, 0, 1, 1, 0, 1, column, tree)

    client = Server(look).client
    replies = [await client.get("/tree") for _ in range(3)]
    assert len(taken) == 1 and {one.status_code for one in replies} == {200}
    found = replies[0].json()
    assert found["pool"] == {"total": 10, "free": 7, "cached": 2, "nodes": 1}
    assert (found["namespaces"], found["parents"]) == (["default"], [-1, 0])
    failed = await Server().client.get("/tree")
    assert failed.status_code == 503 and "no engine" in failed.json()["error"]
