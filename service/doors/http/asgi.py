"""The HTTP door in a process of any ASGI server, by settings in the environment:

uvicorn --factory service.doors.http.asgi:application
"""

from __future__ import annotations

import logging
import os
from typing import Final

from config.settings import SettingsError, load_settings
from service.doors.http.application import Application
from service.doors.kit.process import Setup
from service.keys import secret_of
from service.metrics import Metrics

LOG: Final = logging.getLogger("uvicorn.error")
NAME: Final = "http-asgi"
"""The process's name in its metrics, and for the engine."""


def application() -> Application:
    """The door of the service with the same `server.socket`, `server.secret_file` and `auth`.

    Raises SettingsError, KeysError.
    """
    settings = load_settings([])
    server = settings.server
    if server.socket is None or server.secret_file is None:
        raise SettingsError("set server.socket and server.secret_file, as of the service")
    setup = Setup(settings, Metrics(NAME), server.socket, NAME, secret_of(server.secret_file))
    made = Application(setup, lambda: stop(made))
    return made


def stop(made: Application) -> None:
    """The engine cannot be called, or has ended before it answered."""
    LOG.error("cannot serve: %s", made.failed or f"no engine at {made.setup.engine_socket}")
    os._exit(1)
