"""Every error as OpenAI's envelope: {"error": {"message", "type", "param", "code"}}."""

import logging
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from engine.errors import RequestError, SluiceError

CLIENT_CLOSED_REQUEST = 499
RETRY_AFTER_S = 1
RETRIABLE = (429, 503)
ROUTES = "Use POST /v1/completions, POST /v1/chat/completions or GET /v1/models."

logger = logging.getLogger(__name__)


def envelope(error: SluiceError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def internal_error() -> SluiceError:
    """What a client may know of a fault of ours."""
    return SluiceError("The server failed on this request; send it again.", code="internal_error")


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(SluiceError, _on_known)
    app.add_exception_handler(HTTPException, _on_route)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_fault)


def _respond(error: SluiceError, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(envelope(error), error.status, headers)


async def _on_known(request: Request, error: Exception) -> Response:
    assert isinstance(error, SluiceError)
    return _respond(error, {"retry-after": str(RETRY_AFTER_S)} if error.status in RETRIABLE else None)


async def _on_route(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    problem = RequestError(f"{request.method} {request.url.path}: {error.detail}. {ROUTES}")
    problem.status = error.status_code
    return _respond(problem, dict(error.headers or {}))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_fault(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this, so that the server logs it."""
    return _respond(internal_error())
