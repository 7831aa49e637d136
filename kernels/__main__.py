"""`attnd compile`, or `python -m kernels compile`: fill the kernel cache ahead of time.

No GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

from kernels.backend import NUMPY_DTYPES
from kernels.compile import ARCHITECTURES, DEFAULT_CACHE, CompileError, compile_all
from kernels.cuda.common.kernel import HEAD_DIMS
from kernels.cuda.specs import service_specs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="attnd")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("compile", help="compile what services of some pools launch")
    build.add_argument("--arch", default=",".join(ARCHITECTURES), help="comma-separated targets")
    build.add_argument("--head-dim", default="128", help=f"comma-separated, of {HEAD_DIMS}")
    build.add_argument("--dtype", default="fp16,bf16", help="comma-separated pool dtypes")
    build.add_argument("--page-size", default="16", help="comma-separated")
    build.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    build.add_argument("--jobs", type=int, help="kernels compiled at once; default: the cores")
    arguments = parser.parse_args(argv)
    dims = [int(dim) for dim in arguments.head_dim.split(",")]
    dtypes = [name for name in NUMPY_DTYPES if name in arguments.dtype.split(",")]
    sizes = [int(size) for size in arguments.page_size.split(",")]
    for arch in arguments.arch.split(","):
        pools = product(dims, dtypes, sizes)
        wanted = dict.fromkeys(s for pool in pools for s in service_specs(arch, *pool))
        try:
            compiled = compile_all(list(wanted), arch, arguments.cache, arguments.jobs)
        except CompileError as error:
            print(error, file=sys.stderr)
            return 1
        for kernel in compiled:
            print(f"{arch} {kernel.resources.registers:3} registers  {kernel.spec}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
