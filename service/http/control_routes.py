"""The control routes, in JSON: sequences, page tables, info, pool, health, metrics, docs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict

from config.settings import ServerSettings
from service import __version__, schemas
from service.engine import operations as ops
from service.engine.engine import Engine
from service.errors import InvalidRequest, NotReady
from service.http import answers
from service.http.bodies import JSON, MAX_JSON_BYTES, media_type, read_body
from service.http.checks import check_ids, check_layer
from service.http.exchange import Exchange
from service.http.ledger import Ledger
from service.http.sending import dump, submit
from service.metrics import Metrics
from service.wire import load_json

EXCHANGE: Final = "attnd.exchange"
"""Where the scope carries the `Exchange`."""

Model = TypeVar("Model", bound=schemas.Fields)
SequenceIdPath = Annotated[str, Path(pattern=schemas.ID_PATTERN)]


class ListQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    after: Annotated[str | None, Query(pattern=schemas.ID_PATTERN)] = None
    """List those after this id; absent: from the start."""
    limit: Annotated[int, Query(ge=1, le=schemas.MAX_PAGE)] = 100


@dataclass(frozen=True, slots=True)
class Control:
    """What the routes work with."""

    engine: Engine
    metrics: Metrics
    ledger: Ledger
    server: ServerSettings

    async def ask(self, request: Request, operation: ops.Operation) -> Any:
        """The engine's answer, with its timings left for the response's headers."""
        exchange: Exchange = request.scope[EXCHANGE]
        reply = await submit(
            self.engine, operation, exchange, request.receive, self.server.deadline_s
        )
        return reply.answer

    async def read(self, request: Request, model: type[Model]) -> Model:
        """The JSON body as a model; raises what a body can deserve."""
        exchange: Exchange = request.scope[EXCHANGE]
        media_type(exchange, JSON)
        limit = min(self.server.max_body_bytes, MAX_JSON_BYTES)
        body = await read_body(request.receive, exchange, limit)
        return schemas.validate(model, load_json(bytes(body), "the body"))


def answer(document: Any, status: int = 200) -> Response:
    """JSON; the answers are made here, so nothing is checked on the way out."""
    return Response(dump(document), status, media_type=JSON)


def told(model: type[BaseModel], status: int = 200, what: str = "The answer.") -> dict[str, Any]:
    """What OpenAPI says of a route's success."""
    return {"status_code": status, "responses": {status: {"model": model, "description": what}}}


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """What OpenAPI says of a route's body; `service/http/openapi.py` adds the model."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def no_query(request: Request) -> None:
    """An option that a route does not apply is refused, not ignored."""
    if query := request.scope["query_string"]:
        raise InvalidRequest("query", query.decode("latin-1"), "this route takes no parameters")


def make_routers(control: Control) -> tuple[APIRouter, ...]:
    return sequence_routes(control), pool_routes(control), health_routes(control)


def sequence_routes(control: Control) -> APIRouter:
    router = APIRouter(tags=["sequences"])
    plain = [Depends(no_query)]

    @router.post(
        "/v1/sequences",
        name="create_sequences",
        summary="Make sequences, empty or forked; all or none",
        openapi_extra=takes(schemas.CreateFields),
        dependencies=plain,
        **told(schemas.CreatedAnswer, 201, "The sequences, in the order given."),
    )
    async def create_sequences(request: Request) -> Response:
        fields = await control.read(request, schemas.CreateFields)
        check_ids("sequences", [new.id for new in fields.sequences if new.id is not None])
        new = tuple(ops.NewSequence(one.id, one.parent, one.length) for one in fields.sequences)
        made = await control.ask(request, ops.CreateSequences(new))
        return answer({"sequences": [answers.tell_sequence(one) for one in made]}, 201)

    @router.get(
        "/v1/sequences",
        name="list_sequences",
        summary="List sequences by id, a page at a time",
        **told(schemas.ListAnswer),
    )
    async def list_sequences(request: Request, query: Annotated[ListQuery, Query()]) -> Response:
        found = await control.ask(request, ops.ListSequences(query.after, query.limit + 1))
        shown = found[: query.limit]
        following = shown[-1].id if len(found) > query.limit else None
        sequences = [answers.tell_sequence(one) for one in shown]
        return answer({"sequences": sequences, "next": following})

    @router.get(
        "/v1/sequences/{id}",
        name="get_sequence",
        summary="One sequence",
        dependencies=plain,
        **told(schemas.SequenceAnswer),
    )
    async def get_sequence(request: Request, id: SequenceIdPath) -> Response:
        return answer(answers.tell_sequence(await control.ask(request, ops.GetSequence(id))))

    @router.delete(
        "/v1/sequences/{id}",
        name="delete_sequence",
        summary="Delete a sequence; its forks keep what they share",
        status_code=204,
        response_class=Response,
        responses={204: {"description": "It is gone."}},
        dependencies=plain,
    )
    async def delete_sequence(request: Request, id: SequenceIdPath) -> Response:
        await control.ask(request, ops.DeleteSequence(id))
        return Response(status_code=204)

    @router.post(
        "/v1/sequences/{id}/truncate",
        name="truncate",
        summary="Keep a sequence's first tokens, at every layer",
        openapi_extra=takes(schemas.TruncateFields),
        dependencies=plain,
        **told(schemas.SequenceAnswer),
    )
    async def truncate(request: Request, id: SequenceIdPath) -> Response:
        fields = await control.read(request, schemas.TruncateFields)
        cut = await control.ask(request, ops.Truncate(id, fields.length))
        return answer(answers.tell_sequence(cut))

    @router.post(
        "/v1/page-table",
        name="page_table",
        summary="The CSR page table of sequences, and their cascade levels",
        openapi_extra=takes(schemas.PageTableFields),
        dependencies=plain,
        **told(schemas.PageTableAnswer),
    )
    async def page_table(request: Request) -> Response:
        fields = await control.read(request, schemas.PageTableFields)
        check_layer(fields.layer, control.engine.info)
        ids = check_ids("sequences", fields.sequences)
        table = await control.ask(request, ops.PageTable(ids, fields.layer))
        return answer(answers.tell_page_table(table))

    return router


def pool_routes(control: Control) -> APIRouter:
    router = APIRouter(tags=["service"], dependencies=[Depends(no_query)])

    @router.get(
        "/v1/info",
        name="info",
        summary="Geometry, dtypes, backend, device, limits, version",
        **told(schemas.InfoAnswer),
    )
    async def info() -> Response:
        server = control.server
        limits = {
            "max_body_bytes": server.max_body_bytes,
            "max_json_body_bytes": min(server.max_body_bytes, MAX_JSON_BYTES),
            "queue_depth": server.queue_depth,
            "deadline_s": server.deadline_s,
        }
        engine = control.engine
        who = {"version": __version__, "instance_id": engine.instance_id}
        return answer(who | answers.tell_info(engine.info) | {"limits": limits})

    @router.get(
        "/v1/pool",
        name="pool",
        summary="Pages, sequences and nodes, and whether they are consistent",
        **told(schemas.PoolAnswer),
    )
    async def pool(request: Request) -> Response:
        return answer(answers.tell_pool(await control.ask(request, ops.PoolStatus())))

    return router


def health_routes(control: Control) -> APIRouter:
    router = APIRouter(tags=["health"], dependencies=[Depends(no_query)])

    @router.get(
        "/health/live",
        name="live",
        summary="Whether the process answers",
        **told(schemas.HealthAnswer),
    )
    async def live() -> Response:
        return answer({"status": "live"})

    @router.get(
        "/health/ready",
        name="ready",
        summary="Whether requests are taken; 503 with the reason when not",
        **told(schemas.HealthAnswer),
    )
    async def ready() -> Response:
        if control.engine.state != "ready":
            raise NotReady(control.engine.reason)
        return answer({"status": "ready"})

    @router.get(
        "/metrics",
        name="metrics",
        summary="Metrics in Prometheus' text format",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        control.ledger.settle()
        body, content_type = control.metrics.render()
        return Response(body, headers={"content-type": content_type})

    return router
