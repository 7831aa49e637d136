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
        found: list[BaseRoute] = [
            Route(f"{MODEL}/infer", self.infer),
            Route(f"{MODEL}/versions/{{version}}/infer", self.infer),
            page("/v2", self.server),
            page("/v2/health/live", self.live, "live", needs_no_key=True),
            page("/v2/health/ready", self.ready, "ready", needs_no_key=True),
            page("/v2/models/stats", self.all_statistics),
            page("/v2/repository/index", self.index, method="POST"),
        ]
        for path in (MODEL, f"{MODEL}/versions/{{version}}"):
            found += [
                page(path, self.metadata),
                page(f"{path}/ready", self.model_ready, "ready"),
                page(f"{path}/config", self.config),
                page(f"{path}/stats", self.model_statistics),
            ]
        return found

    async def live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        self.door.link.check_heard()
        return json_response({"ready": True})

    async def model_ready(self, request: Request) -> Response:
        model = model_in(request)
        self.door.link.check_heard()
        return json_response({"name": model.name, "ready": True})

    async def server(self, request: Request) -> Response:
        return json_response(models.server_metadata())

    async def metadata(self, request: Request) -> Response:
        return json_response(models.metadata(model_in(request)))

    async def config(self, request: Request) -> Response:
        return json_response(models.config(model_in(request)))

    async def index(self, request: Request) -> Response:
        return json_response(models.index(self.door.state))

    async def model_statistics(self, request: Request) -> Response:
        return self.counted(request, [model_in(request)])

    async def all_statistics(self, request: Request) -> Response:
        return self.counted(request, MODELS.values())

    def counted(self, request: Request, of: Iterable[Model]) -> Response:
        exchange: Exchange = request.scope[EXCHANGE]
        exchange.tenant.require("admin", exchange.path)
        self.door.ledger.settle()
        return json_response({"model_stats": statistics(of, self.door.metrics)})


def model_in(request: Request) -> Model:
    """The model that the path names."""
    params = request.path_params
    return model_of(params["model"], params.get("version", ""))


def page(
    path: str,
    answer: Callable[[Request], Any],
    name: str = "model",
    method: str = "GET",
    *,
    needs_no_key: bool = False,
) -> Route:
    return Route(path, named(name, answer, needs_no_key=needs_no_key), methods=[method])


def json_response(document: Any) -> Response:
    return Response(dump_json(document), media_type=JSON)
