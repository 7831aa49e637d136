"""Checks of the start that need no torch: seconds before the model is loaded, not after."""

from __future__ import annotations

import argparse
import socket
import sys
from typing import Final

from attnd import AttndError, Info, Session

from examples.local_service import check_free

READER_S: Final = 30
CHECK_S: Final = 10.0


def checked(chosen: argparse.Namespace) -> tuple[socket.socket, Info | None]:
    """The socket of the API, bound; and the pool of the attnd that runs already. Exits with one
    line where the program cannot start."""
    info = None
    try:
        if chosen.model is not None and not (chosen.model / "config.json").is_file():
            raise ValueError(f"{chosen.model} has no model: there is no config.json")
        if chosen.attnd is None:
            check_free(chosen.attnd_port)
        else:
            with Session(chosen.attnd, timeout=CHECK_S, retries=0) as session:
                info = session.info()
        return bind(chosen.host, chosen.port), info
    except (AttndError, OSError, ValueError) as error:
        sys.exit(f"cannot start: {error}")


def bind(host: str, port: int) -> socket.socket:
    """A socket whose connections the system ends when their callers take nothing for so long."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * READER_S)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise OSError(f"port {port} of {host}: {error.strerror}; --port takes another") from None
    return listening
