"""The command `attnd`, the console script of the distribution.

It is imported as `attnd_service.service.command`, before the folder with the package `service` is
on the import path.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from .launch import hold_hang_ups, import_from_home

USAGE: Final = """\
usage: attnd COMMAND [argument ...]

  attnd serve [--SECTION.KEY VALUE ...]   serve until SIGTERM or SIGINT
  attnd serve --help                      list the settings
  attnd gateway --attnd URL [...]         a gateway of Triton's and KServe's protocol
  attnd key new --namespace NAME          make a key for a namespace
  attnd compile --arch sm_90a             compile CUDA kernels ahead of the first start
  attnd --version                         print the version
"""


def attnd(argv: Sequence[str] | None = None) -> int:
    """Run the console script; its exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    import_from_home()
    if name in ("serve", "gateway", "key", "--version"):
        hold_hang_ups()  # before the imports, which take longest
        from service.__main__ import main as serve

        return serve(rest if name == "serve" else [name, *rest])
    if name == "compile":
        from kernels.__main__ import main as compile_kernels

        return compile_kernels([name, *rest])
    if name in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    hint = "settings follow `attnd serve`" if name.startswith("-") else "see `attnd --help`"
    text = f"attnd: {name}: unknown command, expected serve, gateway, key or compile: {hint}"
    print(text, file=sys.stderr)
    return 2
