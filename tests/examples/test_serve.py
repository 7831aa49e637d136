"""The serving engine of examples/serve, through OpenAI's own package."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from attnd import AttndError, Client
from attnd.transformers import geometry_of, pool_settings
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.driver.servers import free_port
from examples.local_service import serve_tcp
from examples.serve import api, launch
from examples.serve.__main__ import arguments
from examples.serve.answers import Sampling
from tests.examples.served import SYSTEM, Server, running, save_tiny
from tests.examples.tiny_decoders import greedy
from tests.harness.processes import children, run
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
POOL_TOKENS = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


def is_open(url: str) -> bool:
    """Whether a program listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rsplit(":", 1)[1]))) == 0


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running(folder, "--pool-tokens", str(POOL_TOKENS)) as server:
        yield server


@pytest.fixture(scope="module")
def expect(folder: Path) -> Any:
    """The text that `generate` of transformers itself gives, greedily."""
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def expected(question: str, count: int = 40) -> str:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        text: str = tokenizer.decode(greedy(model, ids, count), skip_special_tokens=True)
        return text

    return expected


def text_of(reply: Any) -> str:
    found: str = reply.choices[0].message.content
    return found


def pages_in_use(server: Server) -> int:
    with Client(server.attnd) as client:
        return len(list(client.list_sequences()))


def test_an_answer_equals_generate_alone_and_from_the_cache(server: Server, expect: Any) -> None:
    first, second = server.chat("one?"), server.chat("one?")
    assert text_of(first) == text_of(second) == expect("one?")
    assert second.usage.prompt_tokens_details.cached_tokens >= 100
    assert first.usage.completion_tokens == 40
    assert first.choices[0].finish_reason == "length"


def test_answers_of_a_full_batch_and_after_preemptions_equal_generate(
    server: Server, expect: Any
) -> None:
    before = server.preemptions()
    questions = [f"question {number} of many, {'x' * 9 * number}?" for number in range(10)]
    with ThreadPoolExecutor(10) as pool:
        replies = list(pool.map(lambda one: server.chat(one, max_tokens=60), questions))
    assert [text_of(reply) for reply in replies] == [expect(one, 60) for one in questions]
    assert server.preemptions() > before
    wait_for(lambda: pages_in_use(server) == 0, "sequences to be deleted")


def test_a_stream_has_the_same_text_and_usage(server: Server, expect: Any) -> None:
    chunks = list(server.chat("streamed?", stream=True, stream_options={"include_usage": True}))
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == expect("streamed?")
    assert chunks[-1].usage.completion_tokens == 40
    assert chunks[-2].choices[0].finish_reason == "length"


def test_several_answers_are_forks_of_one_prompt(server: Server, expect: Any) -> None:
    reply = server.chat("several?", n=3)
    assert [one.message.content for one in reply.choices] == [expect("several?")] * 3
    drawn = server.chat("several?", n=3, temperature=1.5, seed=5)
    again = server.chat("several?", n=3, temperature=1.5, seed=5)
    texts = [one.message.content for one in drawn.choices]
    assert texts == [one.message.content for one in again.choices]
    assert len(set(texts)) == 3


def test_a_stop_string_ends_an_answer_before_it(server: Server, expect: Any) -> None:
    whole = expect("stop?")
    stop = whole[10:13]
    for given in ([stop], whole[10:16]):
        reply = server.chat("stop?", stop=given)
        assert text_of(reply) == whole[: whole.index(stop)]
        assert reply.choices[0].finish_reason == "stop"


def test_logprobs_are_those_of_the_chosen_tokens(server: Server) -> None:
    reply = server.chat("logprobs?", logprobs=True, top_logprobs=2, max_tokens=3)
    rows = reply.choices[0].logprobs.content
    assert len(rows) == 3
    for row in rows:
        assert row.top_logprobs[0].logprob == row.logprob <= 0  # greedy: the most likely one
        assert row.top_logprobs[1].logprob <= row.logprob


def test_completions_take_text_and_tokens(server: Server, folder: Path) -> None:
    ids = PreTrainedTokenizerFast.from_pretrained(folder)("To be, or")["input_ids"]
    complete = server.openai.completions.create
    by_text = complete(model="tiny", prompt="To be, or", temperature=0)
    by_ids = complete(model="tiny", prompt=ids, temperature=0)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.usage.prompt_tokens == len(ids) == 9
    assert by_text.usage.completion_tokens == 16


def test_models_are_listed_and_retrieved(server: Server) -> None:
    (listed,) = server.openai.models.list().data
    assert listed == server.openai.models.retrieve("tiny") and listed.id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'org/other' does not exist; 'tiny' does"):
        server.openai.models.retrieve("org/other")


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"model": "other"}, openai.NotFoundError, "does not exist"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"max_tokens": 10**6}, openai.BadRequestError, str(POOL_TOKENS)),
        ({"stop": ["a"] * 5}, openai.BadRequestError, "stop"),
        ({"stop": "a" * 10**5}, openai.BadRequestError, "stop"),
        ({"seed": True}, openai.BadRequestError, "seed"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools is not served"),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "functions is not served"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "not served"),
    ],
)
def test_a_wrong_request_gets_openais_error(
    server: Server, fields: dict[str, Any], error: type[openai.APIStatusError], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        server.chat("wrong?", **fields)
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["type"] == "invalid_request_error"


def test_every_field_of_openais_package_is_known() -> None:
    """Each is served, refused with its name, or changes nothing here: none is a typing error."""
    of_the_call = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    resources = openai.resources
    for create, body in (
        (resources.chat.completions.Completions.create, api.ChatBody),
        (resources.completions.Completions.create, api.CompletionBody),
    ):
        known = {*body.model_fields, *api.NOT_SERVED.split(), *api.IGNORED.split()}
        assert set(inspect.signature(create).parameters) - of_the_call <= known


def test_a_reply_of_openais_package_is_a_message_of_the_next_request(server: Server) -> None:
    first = server.chat("first?", max_tokens=3).choices[0].message
    messages = [{"role": "user", "content": "first?"}, first, {"role": "user", "content": "more?"}]
    again = server.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert again.usage is not None and again.usage.completion_tokens == 1


def test_null_is_as_a_field_that_is_not_there(server: Server, expect: Any) -> None:
    nulls = dict.fromkeys(("n", "stop", "top_p", "seed", "stream", "logprobs", "tools"))
    reply = server.chat("nulls?", **nulls, response_format={"type": "text"})
    assert text_of(reply) == expect("nulls?")
    complete = server.openai.completions.create
    assert complete(model="tiny", prompt="x", max_tokens=None).usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"model": ', 400),
        (b'{"model": "\xff"}', 400),
        (b"[" * 100_000, 400),
        (b'{"seed": ' + b"9" * 10_000 + b"}", 400),
        (b'{"model": "' + b"x" * 10_000_000 + b'"}', 413),
    ],
    ids=lambda one: repr(one[:20]) if isinstance(one, bytes) else None,
)
def test_bodies_that_are_no_requests_get_openais_error(
    server: Server, content: bytes, status: int
) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert text_of(server.chat("and then?", max_tokens=1))


def test_a_stream_that_its_caller_closes_frees_its_pages(server: Server) -> None:
    stream = server.chat("abandoned?", stream=True, max_tokens=600)
    next(iter(stream))
    assert pages_in_use(server) == 1
    stream.close()
    wait_for(lambda: pages_in_use(server) == 0, "its sequence to be deleted")


def test_a_caller_that_disconnects_before_its_reply_frees_its_pages(server: Server) -> None:
    with pytest.raises(openai.APITimeoutError):
        server.chat("abandoned too?", max_tokens=600, timeout=0.5)
    wait_for(lambda: pages_in_use(server) == 0, "its sequence to be deleted")
    assert not [line for line in server.process.lines if "Traceback" in line]


def test_a_reader_that_reads_nothing_delays_no_other(server: Server, expect: Any) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,  # far more bytes than the system's buffers take
        "max_tokens": 600,
    }
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    )
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        idle.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        wait_for(lambda: pages_in_use(server) == 1, "its answer to run")
        assert text_of(server.chat("meanwhile?")) == expect("meanwhile?")
        wait_for(lambda: pages_in_use(server) == 0, "its answer to end, although it is not read")


def test_a_path_that_is_none_and_text_that_is_none_get_openais_error(server: Server) -> None:
    unknown = httpx.get(f"{server.url}/v1/unknown")
    headers = {"content-type": "application/json"}
    message = {"model": "tiny", "messages": [{"role": "user", "content": "\ud800"}]}
    replies = [
        httpx.post(f"{server.url}/v1/{path}", content=json.dumps(body), headers=headers)
        for path, body in (
            ("chat/completions", message),
            ("completions", {"model": "tiny", "prompt": "\udc00"}),
        )
    ]
    assert [one.status_code for one in (unknown, *replies)] == [404, 400, 400]
    for reply in (unknown, *replies):
        assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.slow
def test_the_default_model_answers_as_generate_does() -> None:
    """SmolLM2, alone and in a batch, the second time from the cache."""
    model, tokenizer, name = launch.load(None)
    assert geometry_of(launch.outline(None)) == geometry_of(model)
    assert launch.recommended(model.generation_config, 9) == Sampling(9, 0.2, 0.9)
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    environment = composed["services"]["attnd-chat"]["environment"]
    for setting, value in pool_settings(model).items():
        key = f"ATTND_{setting.replace('.', '__').replace('-', '_').upper()}"
        assert environment[key] == str(value), "compose's pool is that of the default model"
    questions = ["What is the capital of France?", "Name three colours.", "Count to five."]

    def expected(question: str) -> str:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        out = model.generate(ids, max_new_tokens=10, do_sample=False)
        text: str = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return text

    with running(None) as server, ThreadPoolExecutor(3) as pool:

        def ask(question: str) -> str:
            reply = server.openai.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=10,
            )
            return text_of(reply)

        wanted = [expected(one) for one in questions]
        assert [ask(one) for one in questions] == wanted
        assert list(pool.map(ask, questions)) == wanted


def survives(server: Server, expect: Any, kill: Callable[[], object]) -> None:
    """Answers that run while attnd is killed are those of `generate`."""
    with ThreadPoolExecutor(4) as pool:
        asked = [f"survivor {number}?" for number in range(4)]
        futures = [pool.submit(server.chat, one, max_tokens=150) for one in asked]
        wait_for(lambda: pages_in_use(server) == 4, "answers to run")
        kill()
        replies = [future.result(180) for future in futures]
        assert [text_of(reply) for reply in replies] == [expect(one, 150) for one in asked]


def test_answers_survive_an_attnd_that_is_killed_and_started_again(
    folder: Path, expect: Any
) -> None:
    settings = pool_settings(LlamaForCausalLM.from_pretrained(folder), tokens=32768)
    settings["server.port"] = free_port()
    with ExitStack() as first, ExitStack() as second:
        url = first.enter_context(serve_tcp(settings))

        def kill() -> None:
            for pid in descendants(os.getpid()):
                if f"--server.port\0{settings['server.port']}".encode() in command_line(pid):
                    os.kill(pid, signal.SIGKILL)
            first.close()
            wait_for(lambda: not is_open(url), "its doors to end")
            second.enter_context(serve_tcp(settings))

        with running(folder, "--attnd", url) as server:
            survives(replace(server, attnd=url), expect, kill)


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def descendants(pid: int) -> list[int]:
    found = list(children(pid))
    return found + [one for child in found for one in descendants(child)]


def test_a_signal_ends_both_services_and_callers_get_an_error(folder: Path) -> None:
    """SIGINT; every other server here ends by SIGTERM."""
    with running(folder, "--answer-tokens", "4096") as server:
        short = server.chat("short?", stream=True, max_tokens=3)
        long = server.chat("long?", stream=True, max_tokens=None)
        next(iter(long))
        pids = descendants(server.process.child.pid)
        server.process.send_signal(signal.SIGINT)
        assert [one.choices[0].finish_reason for one in short][-1] == "length"
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(long)
        attnd = server.attnd
    assert not is_open(attnd)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not [line for line in server.process.lines if "Traceback" in line]


def test_what_cannot_start_says_why_in_one_line(server: Server, folder: Path) -> None:
    for options, says in (
        (["--port", server.url.rsplit(":", 1)[1]], "ddress already in use"),
        (["--port", str(free_port()), "--attnd", "http://example.com"], "is another host"),
    ):
        command = [sys.executable, "-m", "examples.serve", "--model", folder, *options]
        done = run(*command)
        assert done.returncode != 0
        assert says in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_a_start_without_what_it_needs_is_an_error_that_names_it(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    shallow = LlamaConfig.from_pretrained(folder)
    shallow.num_hidden_layers = 1
    port = server.attnd.rsplit(":", 1)[1]
    for started, options, says in (
        (model, ["--attnd-port", port], f"another program listens on port {port}"),
        (model, ["--attnd", str(folder / "none")], "no engine at"),
        (LlamaForCausalLM(shallow), ["--attnd", server.attnd], "the service's pool is 2 layers"),
    ):
        monkeypatch.setattr(sys, "argv", ["serve", *options])
        errors = (AttndError, OSError, RuntimeError, ValueError)
        with pytest.raises(errors, match=says), ExitStack() as stack:
            launch.start(arguments(), started, stack)


def test_a_running_attnd_serves_by_its_socket(server: Server, folder: Path, expect: Any) -> None:
    port = server.attnd.rsplit(":", 1)[1]
    place = f"{tempfile.gettempdir()}/attnd-{os.getuid()}/{port}.sock"
    server.chat("elsewhere?")
    with running(folder, "--attnd", place, "--live", f"{server.attnd}/live") as other:
        reply = other.chat("elsewhere?")
        assert text_of(reply) == expect("elsewhere?")
        assert f"{server.attnd}/live" in httpx.get(other.url).text
    assert reply.usage.prompt_tokens_details.cached_tokens >= 100  # the first one's
