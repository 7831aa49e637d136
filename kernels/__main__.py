"""`attnd compile`, or `python -m kernels compile`: fill the kernel cache ahead of time.

No GPU is needed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TypeVar

from kernels.backend import NUMPY_DTYPES
from kernels.compile import ARCHITECTURES, DEFAULT_CACHE, CompileError, compile_all
from kernels.cuda.common.kernel import HEAD_DIMS

NEEDS_CUPY = "attnd compile: needs CuPy, which is not installed: install the extra cuda, or cuda12"
T = TypeVar("T")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="attnd")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("compile", help="compile what services of some pools launch")
    build.add_argument("--arch", default=",".join(ARCHITECTURES), help="comma-separated targets")
    dims = any_of({str(dim): dim for dim in HEAD_DIMS})
    build.add_argument(
        "--head-dim", type=dims, default="128", help=f"comma-separated, of {HEAD_DIMS}"
    )
    dtypes = any_of({name: name for name in NUMPY_DTYPES})
    build.add_argument("--dtype", type=dtypes, default="fp16,bf16", help="pool dtypes, with commas")
    build.add_argument("--page-size", type=sizes, default="16", help="comma-separated")
    build.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    build.add_argument("--jobs", type=int, help="kernels compiled at once; default: the cores")
    arguments = parser.parse_args(argv)
    if find_spec("cupy") is None:
        print(NEEDS_CUPY, file=sys.stderr)
        return 2
    from kernels.cuda.specs import service_specs

    for arch in arguments.arch.split(","):
        pools = product(arguments.head_dim, arguments.dtype, arguments.page_size)
        wanted = dict.fromkeys(s for pool in pools for s in service_specs(arch, *pool))
        try:
            compiled = compile_all(list(wanted), arch, arguments.cache, arguments.jobs)
        except CompileError as error:
            print(error, file=sys.stderr)
            return 1
        for kernel in compiled:
            print(f"{arch} {kernel.resources.registers:3} registers  {kernel.spec}")
    return 0


def any_of(values: Mapping[str, T]) -> Callable[[str], list[T]]:
    """Reads a list of some values, with commas."""

    def read(text: str) -> list[T]:
        for name in text.split(","):
            if name not in values:
                expected = f"expected any of {', '.join(values)}, with commas"
                raise argparse.ArgumentTypeError(f"{name!r}: {expected}")
        return [values[name] for name in text.split(",")]

    return read


def sizes(text: str) -> list[int]:
    """Reads a list of positive numbers, with commas."""
    if not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of tokens, with commas")
    return [int(size) for size in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
