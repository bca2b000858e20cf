"""Fixtures of the HTTP tests: the default model's text side over one scripted engine."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.http import create_app
from deployments.served import ServedModel
from tests.fakes_http import ScriptedEngine
from tests.http_client import Api, client


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def served(model_folder: Path) -> ServedModel:
    return ServedModel.load("smol", model_folder)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def api(served: ServedModel, engine: ScriptedEngine) -> AsyncIterator[Api]:
    async with client(create_app(served, {"only": engine}, max_body_bytes=2**20)) as http:
        yield Api(http)
    assert engine.running == set()
