"""What the Serve config file's `args` and `user_config` may say."""

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from engine.config import EngineConfig, Frozen
from engine.errors import ConfigError
from engine.policies import PolicyConfig

INGRESS = "Ingress"


class PoolConfig(Frozen):
    """One engine pool: a deployment of the same name, whose engines differ from `AppConfig.engine` in these fields."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    engine: dict[str, Any] = Field({})


class AppConfig(Frozen):
    """The application's `args`. A change here restarts every replica; what may change live is in `UserConfig`.

    `engine` holds fields of EngineConfig for all pools. `engine_cpus`, and on cuda `engine_gpus`, is what Ray reserves
    per engine, numbers for its book-keeping only: 0.5 lets two engines share a GPU. An engine that has work but makes
    no step for `stalled_after_s` is replaced.
    """

    model: str = "smollm2-135m-instruct"
    model_cache: Path = Path("~/.cache/sluice")
    served_model_name: str | None = None
    engine: dict[str, Any] = Field({})
    engine_cpus: float = Field(0.1, ge=0.0)
    engine_gpus: float = Field(1.0, gt=0.0)
    stalled_after_s: float = Field(60.0, gt=0.0)
    pools: tuple[PoolConfig, ...] = Field(min_length=1)

    @property
    def served_name(self) -> str:
        return self.served_model_name or self.model

    def engine_config(self, pool: PoolConfig) -> EngineConfig:
        return EngineConfig.model_validate(self._engine_fields(pool))

    def actor_options(self, config: EngineConfig) -> dict[str, Any]:
        """What Ray reserves for one engine's process."""
        return {"num_cpus": self.engine_cpus, "num_gpus": self.engine_gpus if config.device.startswith("cuda") else 0}

    def _engine_fields(self, pool: PoolConfig) -> dict[str, Any]:
        return {"model": self.model, "model_cache": self.model_cache, **merged(self.engine, pool.engine)}


class UserConfig(Frozen):
    """A pool's `user_config`: what `reconfigure` applies to running engines."""

    policy: PolicyConfig


def parse(args: dict[str, Any]) -> AppConfig:
    """`args` as the builder gets them. Raises ConfigError."""
    try:
        app = AppConfig.model_validate(args)
        for pool in app.pools:
            app.engine_config(pool)
    except ValidationError as error:
        raise ConfigError(f"args of the application: {error}") from error
    return app


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` wins, field by field, also inside mappings."""
    fields = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        fields[key] = merged(base[key], value) if both else value
    return fields
