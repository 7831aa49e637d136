"""`attnd key new`: makes a key, and prints it with its line for `auth.keys_file`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from service.keys import line_of, new_key
from service.tenants import SCOPES

SCOPE_HELP = "what the key may do; may be given several times. Without it: read and append"


def key_command(argv: Sequence[str]) -> int:
    """Carry out the command; its exit status."""
    parser = argparse.ArgumentParser(prog="attnd key", description=__doc__)
    commands = parser.add_subparsers(required=True)
    new = commands.add_parser("new", description="Prints a key, and below it its line.")
    new.add_argument("--namespace", required=True, help="whose sequences the key is for")
    new.add_argument("--scope", action="append", choices=SCOPES, help=SCOPE_HELP)
    given = parser.parse_args(argv)
    key = new_key()
    try:
        line = line_of(key, given.namespace, given.scope or ("read", "append"))
    except ValueError as error:
        print(f"attnd: {error}", file=sys.stderr)
        return 2
    print(key, line, sep="\n")
    return 0
