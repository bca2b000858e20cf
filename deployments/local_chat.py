"""The first request: asks the served model one question and shows the answer as it streams in."""

import json
import time
from collections.abc import Iterator

import httpx

from deployments.local_ports import HOST
from engine.errors import EngineUnavailable

QUESTION = "What is a sluice? Answer in one sentence."
PATIENCE_S = 30.0  # the proxy learns of the application's route a moment after it runs


def ask(model: str, http_port: int) -> Iterator[str]:
    """The answer's text, piece by piece. Raises EngineUnavailable if there is none."""
    url = f"http://{HOST}:{http_port}/v1/chat/completions"
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 40,
        "temperature": 0,
        "stream": True,
    }
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with httpx.stream("POST", url, json=body, timeout=60) as response:
                if response.status_code == 200:
                    yield from _texts(response.iter_lines())
                    return
                said = response.read().decode()
        except httpx.TransportError as error:
            said = repr(error)
        if time.monotonic() > deadline:
            raise EngineUnavailable(f"{url} gave no answer: {said}")
        time.sleep(0.2)


def curl(model: str, http_port: int) -> str:
    """A line to copy that does the same."""
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "stream": True}
    url = f"http://{HOST}:{http_port}/v1/chat/completions"
    return f"curl -N {url} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def _texts(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line == "data: [DONE]":
            return
        if not line:
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise EngineUnavailable(f"The answer broke off: {event['error']['message']}")
        yield event["choices"][0]["delta"].get("content") or ""
    raise EngineUnavailable("The answer broke off without an end.")
