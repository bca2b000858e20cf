"""Ray's errors as ours."""

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from engine.errors import EngineUnavailable, QueueFull, SluiceError

GONE = (RayActorError, ActorUnavailableError, TaskCancelledError, DeploymentUnavailableError)
REMOTE_ERRORS = (RayError, BackPressureError, DeploymentUnavailableError)


def translate(error: Exception) -> Exception:
    """The SluiceError that a remote call's error means, or `error` itself: then it is a bug of ours."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, SluiceError) else error
    if isinstance(error, BackPressureError):
        return QueueFull("Too many requests are waiting. Try again in a moment.", code="queue_full")
    if isinstance(error, GONE):
        return EngineUnavailable("The engine that ran this request has gone. Send it again.", code="engine_gone")
    return error
