"""The supervisor of an embedded engine's doors; started by `service.embedded.doors`."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from service.__main__ import Commands, allow_open_files, supervise
from service.addresses import Addresses
from service.launch import hold_hang_ups
from service.logs import set_up_logs
from service.processes.handover import CheckedFiles, receive
from service.supervisor import MAIN


def main() -> int:
    """Serve until SIGTERM, or the end of the engine's process; the exit status."""
    hold_hang_ups()
    inherited = receive()
    os.setpgid(0, 0)  # Ctrl-C is for the engine's process, which drains its doors
    threading.Thread(target=end_with, args=(inherited.lifeline,), daemon=True).start()
    settings = inherited.settings
    set_up_logs(settings.log, MAIN)
    allow_open_files(settings)
    path = Path(inherited.engine_socket)
    addresses = Addresses(inherited.sockets, inherited.url, (), path, None)
    files = CheckedFiles(settings)
    return supervise(
        settings,
        addresses,
        addresses.close,
        Commands(),
        files,
        inherited.secret,
        inherited.metrics,
    )


def end_with(lifeline: int) -> None:
    """End this process, and by that its doors, once the engine's has ended."""
    os.read(lifeline, 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
