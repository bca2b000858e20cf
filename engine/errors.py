"""The errors a user can cause or must know of, each with the HTTP status it becomes.

SluiceError
├── RequestError         400  this request is wrong; nothing else is lost
│   └── PromptTooLong    400  the request can never fit the context or the KV pool
├── ModelNotFound        404  the requested model is not the served one
├── QueueFull            429  the request was refused before it was queued
├── EngineUnavailable    503  loading, stopping or dead
└── ConfigError          500  the configuration is wrong; raised at start, never while serving
"""


class SluiceError(Exception):
    """Root of the tree. `status` is the HTTP status, `code` the machine-readable reason, `param` the field at fault."""

    status = 500
    kind = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross process borders; keyword arguments would be lost by the default pickling."""
        return _rebuild, (type(self), self.message, self.param, self.code)


def _rebuild(cls: type[SluiceError], message: str, param: str | None, code: str | None) -> SluiceError:
    return cls(message, param=param, code=code)


class RequestError(SluiceError):
    status = 400
    kind = "invalid_request_error"


class PromptTooLong(RequestError):
    """Prompt, or prompt plus output, beyond what the model or the KV pool can ever hold."""


class ModelNotFound(SluiceError):
    status = 404
    kind = "invalid_request_error"


class QueueFull(SluiceError):
    status = 429
    kind = "rate_limit_error"


class EngineUnavailable(SluiceError):
    status = 503


class ConfigError(SluiceError):
    """Raised while starting. The message names the field, what is allowed and what to write instead."""
