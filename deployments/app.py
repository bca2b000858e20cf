"""The Serve application: one ingress, and a deployment per engine pool. Serve calls `build` with the file's `args`."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.config import INGRESS, AppConfig, PoolConfig, UserConfig, parse
from deployments.handle import HandleClient
from deployments.http import create_app
from deployments.replica import EngineReplica
from deployments.served import ServedModel
from engine.catalogue import resolve


@serve.ingress()
class Ingress:
    """The HTTP API in front of the pools. Neither torch nor transformers is imported in its process."""

    def __init__(self, app: AppConfig, pools: Mapping[str, DeploymentHandle[Any]]) -> None:
        self._app = app
        self._pools = {name: HandleClient(handle) for name, handle in pools.items()}

    def __serve_build_asgi_app__(self) -> FastAPI:
        folder = resolve(self._app.model, self._app.model_cache, weights=False)
        api = create_app(ServedModel.load(self._app.served_name, folder), self._pools)
        api.add_api_route("/admin/stats", self._stats, methods=["GET"])
        return api

    async def _stats(self) -> dict[str, Any]:
        """Per pool what one of its engines tells: queues, KV blocks, evictions, time per part of a step."""
        return {name: asdict(await pool.stats()) for name, pool in self._pools.items()}


def build(args: dict[str, Any]) -> serve.Application:
    """Raises ConfigError if `args` is wrong."""
    app = parse(args)
    pools = {pool.name: _pool(app, pool) for pool in app.pools}
    application: serve.Application = serve.deployment(name=INGRESS)(Ingress).bind(app, pools)
    return application


def _pool(app: AppConfig, pool: PoolConfig) -> serve.Application:
    config = app.engine_config(pool)
    policy = UserConfig(policy=config.policy).model_dump(mode="json")
    deployment = serve.deployment(name=pool.name, user_config=policy, max_constructor_retry_count=3)(EngineReplica)
    application: serve.Application = deployment.bind(config, app.actor_options(config), app.stalled_after_s)
    return application
