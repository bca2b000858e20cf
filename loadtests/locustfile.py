"""Users that stream chat answers. Locust's own table shows TTFT, the gaps between tokens (ITL) and the whole (E2E).

locust -f loadtests/locustfile.py --host http://127.0.0.1:8000 --headless -u 8 -r 2 -t 30s
"""

import random
import time
from typing import Any

from locust import HttpUser, between, events, task

from loadtests.sse import StreamError, Timeline, follow

TOPICS = ("rivers", "bread", "the moon", "chess", "lighthouses", "bees", "bridges", "glass")
STYLES = ("in one sentence", "as a list", "for a child", "as a question", "in a few words")


@events.init_command_line_parser.add_listener
def _options(parser: Any) -> None:
    parser.add_argument("--max-tokens", type=int, default=48, help="longest answer, in tokens")
    parser.add_argument("--model", default="", help="served model name; asked from the server if empty")
    parser.add_argument("--policy", default="auto", help="pool to use: its name or its policy, or auto")


class ChatUser(HttpUser):
    """Asks, reads the stream to its end, thinks for a moment, asks again."""

    wait_time = between(0.1, 1.0)

    def on_start(self) -> None:
        self.model = self.environment.parsed_options.model or self._served_model()

    @task
    def chat(self) -> None:
        body = {
            "model": self.model,
            "messages": [
                {"role": "user", "content": f"Tell me about {random.choice(TOPICS)} {random.choice(STYLES)}."}
            ],
            "max_tokens": self.environment.parsed_options.max_tokens,
            "policy": self.environment.parsed_options.policy,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = time.perf_counter()
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code}: {response.text[:200]}")
                return
            try:
                timeline = follow(response.iter_lines(decode_unicode=True), sent, time.perf_counter)
            except StreamError as error:
                response.failure(str(error))
                return
        if timeline.pieces:
            self._record(timeline)

    def _record(self, timeline: Timeline) -> None:
        self._statistic("TTFT", timeline.ttft_s)
        self._statistic("E2E", timeline.e2e_s)
        for gap_s in timeline.gaps_s:
            self._statistic("ITL", gap_s)

    def _statistic(self, kind: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name="chat",
            response_time=seconds * 1e3,
            response_length=0,
            exception=None,
            context={},
        )

    def _served_model(self) -> str:
        return str(self.client.get("/v1/models").json()["data"][0]["id"])
