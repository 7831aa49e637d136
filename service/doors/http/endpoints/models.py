"""The Open Inference Protocol's pages over HTTP: health, models, statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from service.doors.http.endpoints.inference import InferenceEndpoint
from service.doors.http.endpoints.pages import named
from service.doors.http.endpoints.responses import EXCHANGE
from service.doors.http.protocol.exchange import Exchange
from service.doors.kit.headers import JSON
from service.doors.oip import models
from service.doors.oip.models import MODELS, Model, model_of, statistics
from service.image.json_text import dump_json

if TYPE_CHECKING:
    from service.doors.http.door import Door

MODEL: Final = "/v2/models/{model}"


class ModelPages:
    """The endpoints of one door."""

    def __init__(self, door: Door, infer: InferenceEndpoint) -> None:
        self.door = door
        self.infer = infer

    def routes(self) -> list[BaseRoute]:
        """A model's paths with and without its version, and all models' paths."""
        link = self.door.link
        found: list[BaseRoute] = [
            Route(f"{MODEL}/infer", self.infer),
            Route(f"{MODEL}/versions/{{version}}/infer", self.infer),
            page("/v2", lambda _: models.server_metadata()),
            page("/v2/health/live", lambda _: {"live": True}, "live", needs_no_key=True),
            page("/v2/health/ready", self.ready, "ready", needs_no_key=True),
            page("/v2/models/stats", lambda one: self.counted(one, MODELS.values())),
            page("/v2/repository/index", lambda _: models.index(link.state), method="POST"),
        ]
        for path in (MODEL, f"{MODEL}/versions/{{version}}"):
            found += [
                page(path, lambda one: models.metadata(model_in(one))),
                page(f"{path}/ready", lambda one: self.ready(one, model_in(one)), "ready"),
                page(f"{path}/config", lambda one: models.config(model_in(one))),
                page(f"{path}/stats", lambda one: self.counted(one, [model_in(one)])),
            ]
        return found

    def ready(self, request: Request, model: Model | None = None) -> Any:
        self.door.link.check_heard()
        return {"ready": True} if model is None else {"name": model.name, "ready": True}

    def counted(self, request: Request, of: Iterable[Model]) -> Any:
        exchange: Exchange = request.scope[EXCHANGE]
        exchange.tenant.require("admin", exchange.path)
        self.door.ledger.settle()
        return {"model_stats": statistics(of, self.door.metrics)}


def model_in(request: Request) -> Model:
    params = request.path_params
    return model_of(params["model"], params.get("version", ""))


def page(
    path: str,
    document: Callable[[Request], Any],
    name: str = "model",
    method: str = "GET",
    *,
    needs_no_key: bool = False,
) -> Route:
    async def answer(request: Request) -> Response:
        return Response(dump_json(document(request)), media_type=JSON)

    return Route(path, named(name, answer, needs_no_key=needs_no_key), methods=[method])
