"""An engine that does nothing: it answers every call at once with zeros of the right shapes, so
that what stands before it can be measured. Run by `bench.routing`."""

from __future__ import annotations

import argparse
import selectors
import socket
import uuid
from pathlib import Path
from typing import Any

from attnd.wire.frames import NO_STAGES

from service.image.json_text import dump_json
from service.image.reading import place, read_layout, split
from service.image.writing import RESPONSE, in_order, lay, shaped
from service.image.writing import header as header_of
from service.operations.table import BY_NAME, BY_NUMBER
from service.road.engine_end.admission import Admission
from service.road.engine_end.calls import Call, SessionConfig
from service.road.engine_end.listening import listen
from service.road.engine_end.session import Session
from service.road.messages import State
from service.road.tcp import tune

INFO: dict[str, Any] = {
    "version": "0",
    "backend": "none",
    "device": "none",
    "num_layers": 1,
    "num_pages": 1024,
    "page_size": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "layout": "NHD",
    "dtype": "fp16",
    "k_scale": 1.0,
    "v_scale": 1.0,
    "tensor_dtypes": ["F16"],
    "unsupported": [],
    "limits": dict.fromkeys(
        ("max_body_bytes", "max_json_body_bytes", "max_answer_bytes", "max_sequences"), 2**28
    )
    | {"queue_depth": 1024, "deadline_s": 30.0},
}
PAGES = {
    "free": 1024,
    "referenced": 0,
    "cached": 0,
    "pinned": 0,
    "sequences": 0,
    "draining": False,
    "page_s": 1e-5,
    "pair_s": 0.0,
    "read_s": 0.0,
}
SEQUENCE = {"length": 0, "lengths": [0], "pages": 0, "last_page_len": 0}


class StandIn:
    """Its answers, remembered by the request's header."""

    def __init__(self) -> None:
        self.instance = uuid.uuid4().hex
        self.known: dict[tuple[int, bytes], tuple[bytes, int]] = {}

    def answer(self, call: Call) -> int:
        """Write the answer; its length."""
        header, start = split(call.request)
        key = call.operation, header
        if key not in self.known:
            self.known[key] = self.make(call, header, start)
        head, size = self.known[key]
        call.answer[: len(head)] = head
        return size

    def make(self, call: Call, header: bytes, start: int) -> tuple[bytes, int]:
        layout = read_layout(header, len(call.request) - start)
        arrays = place(call.request, start, layout)
        fields: dict[str, Any] = {"lse_base": "e", "levels": 1, "cascade": False}
        answer: dict[str, Any] = {}
        match BY_NUMBER[call.operation].name:
            case "info":
                fields = INFO | {"instance_id": self.instance}
            case "engines":
                fields = {"engines": [PAGES | {"name": "x", "instance_id": self.instance}]}
            case "get_sequence":
                fields = SEQUENCE | {"id": layout.fields["id"], "parent": None, "ttl_s": None}
            case "decode":
                q = arrays["q"]
                answer = {"o": q, "lse": q[:, :, 0].astype("float32")}
        tensors = in_order(shaped(answer))
        head = header_of(RESPONSE, dump_json(fields), tensors)
        lay(call.answer, head, tensors)
        return head, len(head) + sum(one.nbytes for one in answer.values())


def serve(listener: socket.socket, secret: str, *, is_remote: bool) -> None:
    """For ever."""
    engine = StandIn()
    config = SessionConfig(
        instance_id=engine.instance,
        routes={name: operation.number for name, operation in BY_NAME.items()},
        limits={},
        max_arena_bytes=2**30,
        default_deadline_s=30.0,
        admission=Admission(None, secret),
    )
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                session = key.data
                if session is None:
                    sock, _ = listener.accept()
                    if is_remote:
                        tune(sock)
                    session = Session(sock, 1, config, State("ready"), is_remote=is_remote)
                    selector.register(sock, selectors.EVENT_READ, session)
                    continue
                for event in session.read():
                    if isinstance(event, Call):
                        session.answer(event, 200, engine.answer(event), NO_STAGES)
                while session.wants_write and not session.ended:
                    session.flush()
                if session.ended:
                    selector.unregister(session.sock)
                    session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("secret")
    parser.add_argument("--tcp", action="store_true")
    given = parser.parse_args()
    if given.tcp:
        listener = socket.create_server(("127.0.0.1", 0))
        print(f"tcp:127.0.0.1:{listener.getsockname()[1]}", flush=True)
    else:
        listener = listen(given.path, private=False).sock
        print(given.path, flush=True)
    listener.setblocking(True)
    serve(listener, given.secret, is_remote=given.tcp)


if __name__ == "__main__":
    main()
