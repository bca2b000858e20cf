"""The HTTP face of an ingress: an OpenAI-compatible app over any engine clients, without Ray and without a model."""

import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.body import MAX_BODY_BYTES, read_body, work_on
from deployments.choices import Choice, Delta, join
from deployments.client import EngineClient
from deployments.pools import LeastInFlight, PoolChoice, Pools
from deployments.prepare import CHAT, COMPLETIONS, Call, Endpoint
from deployments.problems import add_error_handlers, envelope, internal_error
from deployments.respond import Heading, Shape
from deployments.schema import GenerationRequest, parse
from deployments.served import ServedModel
from deployments.sse import DONE, event, open_stream, while_connected
from engine.errors import EngineUnavailable, ModelNotFound, SluiceError

Deltas = AsyncGenerator[tuple[Choice, Delta], None]

logger = logging.getLogger(__name__)


def create_app(
    served: ServedModel,
    pools: Mapping[str, EngineClient],
    *,
    choice: PoolChoice | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """An app that answers for `served` from `pools`, a pool's name to its engine. At least one pool."""
    assert pools
    api = Api(served, Pools(pools, choice or LeastInFlight()), max_body_bytes)
    app = FastAPI(title="Sluice", openapi_url=None, redirect_slashes=False)
    add_error_handlers(app)
    app.add_api_route("/health", api.health, methods=["GET"])
    app.add_api_route("/v1/models", api.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"])
    app.add_api_route("/v1/completions", api.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", api.chat_completions, methods=["POST"])
    return app


class Api:
    """The routes. Nothing is kept from one request to the next but the pools' readiness and load."""

    def __init__(self, served: ServedModel, pools: Pools, max_body_bytes: int) -> None:
        self._served = served
        self._pools = pools
        self._max_body_bytes = max_body_bytes

    async def health(self) -> Response:
        """200 once an engine is ready, 503 while none is."""
        if not await self._pools.any_ready():
            raise EngineUnavailable("No engine is ready yet; try again in a moment.", code="not_ready")
        return JSONResponse({"status": "ok"})

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._card())

    async def completions(self, request: Request) -> Response:
        return await self._answer(COMPLETIONS, request)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(CHAT, request)

    async def _answer(self, endpoint: Endpoint[Call], request: Request) -> Response:
        body = await read_body(request, self._max_body_bytes)
        call = await work_on(len(body), parse, endpoint.schema, body)
        self._check_model(call.model)
        pool = await self._pools.choose(call.policy)
        heading = Heading(f"{endpoint.id_prefix}-{uuid4().hex}", int(time.time()), self._served.name)
        choices = await work_on(len(body), endpoint.prepare, call, heading.id, self._served, pool.limits)
        shape = endpoint.shape(call, heading, self._served.tokenizer)
        deltas = pool.run(choices)
        if call.stream:
            return await open_stream(_events(deltas, choices, shape, call), request.receive)
        return JSONResponse(await while_connected(request.receive, _whole(deltas, choices, shape)))

    def _check_model(self, name: str) -> None:
        if name != self._served.name:
            message = f"The model {name[:200]!r} is not served here; {self._served.name!r} is."
            raise ModelNotFound(message, param="model", code="model_not_found")

    def _card(self) -> dict[str, Any]:
        return {"id": self._served.name, "object": "model", "created": self._served.created, "owned_by": "sluice"}


async def _whole(deltas: Deltas, choices: Sequence[Choice], shape: Shape) -> dict[str, Any]:
    """The plain answer, once every choice has ended."""
    parts: list[list[Delta]] = [[] for _ in choices]
    async with aclosing(deltas):
        async for choice, delta in deltas:
            parts[choice.index].append(delta)
    return shape.whole([(choice, join(part)) for choice, part in zip(choices, parts, strict=True)])


async def _events(
    deltas: Deltas, choices: Sequence[Choice], shape: Shape, call: GenerationRequest
) -> AsyncGenerator[str, None]:
    """The events of a stream. An error before the first is raised; a later one is told in the stream and ends it."""
    async with aclosing(deltas):
        yield event(shape.chunk(*await anext(deltas)))
        try:
            async for choice, delta in deltas:
                yield event(shape.chunk(choice, delta))
            if call.stream_options.include_usage:
                yield event(shape.last_chunk(choices))
        except SluiceError as error:
            yield event(envelope(error))
        except Exception:  # a fault of ours must not look like the end of an answer
            logger.exception("a stream broke")
            yield event(envelope(internal_error()))
    yield DONE
