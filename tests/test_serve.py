"""The whole system, started as a user starts it, on ports of its own. Takes minutes; the file can be run alone."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from deployments.local_ports import free_port, is_free
from deployments.local_run import Run, saved_run
from tests.goldens import GOLDENS

ROOT = Path(__file__).parents[1]
DEFAULT = ROOT / "cluster" / "config.yaml"
MODEL = "smollm2-135m-instruct"
COUNT = {"model": MODEL, "prompt": "1, 2, 3, 4, 5,", "temperature": 0, "max_tokens": 24}
LONG = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}
PATIENCE_S = 120.0  # only a broken system takes so long


@dataclass(frozen=True)
class Served:
    """A started system: its folder, its ports, and a client of its API."""

    folder: Path
    ports: tuple[int, int, int, int]
    http: httpx.Client
    said: str

    @property
    def run(self) -> Run:
        run = saved_run(self.folder / ".sluice" / f"run-{self.ports[0]}.json")
        assert run is not None
        return run

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.http.get("/admin/stats").raise_for_status().json()
        return stats

    def processes(self, name: str) -> list[psutil.Process]:
        return [process for process in self.run.find() if name in " ".join(process.cmdline())]


def local(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m deployments.local`, with its state in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "deployments.local", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def serve(folder: Path, config: Path, ports: tuple[int, int, int, int]) -> subprocess.CompletedProcess[str]:
    names = ("--http-port", "--dashboard-port", "--ray-port", "--metrics-port")
    options = [text for name, port in zip(names, ports, strict=True) for text in (name, str(port))]
    return local(folder, "serve", "--config", str(config), *options)


def stop(folder: Path, port: int, *options: str) -> subprocess.CompletedProcess[str]:
    return local(folder, "stop", "--config", str(DEFAULT), "--http-port", str(port), *options)


def free_ports() -> tuple[int, int, int, int]:
    return free_port(), free_port(), free_port(), free_port()


def wait_for(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happens():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def served(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, ports = tmp_path_factory.mktemp("served"), free_ports()
    started = serve(folder, DEFAULT, ports)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=PATIENCE_S) as http:
            yield Served(folder, ports, http, started.stdout)
    finally:
        stop(folder, ports[0], "--now")


def test_serve_says_where_it_is_and_has_been_answered(served: Served) -> None:
    assert f"http://127.0.0.1:{served.ports[0]}/v1" in served.said
    assert f"http://127.0.0.1:{served.ports[1]}" in served.said
    assert "What is a sluice?" in served.said
    assert "sluice is" in served.said
    assert "curl -N" in served.said


def test_its_dashboard_shows_the_pools(served: Served) -> None:
    details = httpx.get(f"http://127.0.0.1:{served.ports[1]}/api/serve/applications/").json()
    assert set(details["applications"]["sluice"]["deployments"]) == {"Ingress", "preemption", "retract"}


@pytest.mark.parametrize("pool", ["preemption", "retract"])
def test_both_pools_give_the_known_answer(served: Served, pool: str) -> None:
    answer = served.http.post("/v1/completions", json=COUNT | {"policy": pool})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == " 6, 7, 8, 9, 10, 11, 12,"
    assert answer.json()["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("pool", ["preemption", "retract"])
@pytest.mark.parametrize("prompt", GOLDENS)
def test_golden_tokens_come_out_one_by_one(served: Served, pool: str, prompt: str) -> None:
    golden = GOLDENS[prompt]
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": len(golden), "policy": pool}
    with served.http.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}
    ) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert [token for choice in choices for token in choice["token_ids"]] == golden
    assert not any("\ufffd" in choice["text"] for choice in choices)


def test_a_prompt_is_scored_without_sampling(served: Served) -> None:
    body = {"model": MODEL, "prompt": "The letters run ABC", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = served.http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "The letters run ABC"
    assert answer["choices"][0]["finish_reason"] == "length"
    scores = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert scores[0] is None and len(scores) == 4 and all(score < 0 for score in scores[1:])
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_several_tokens_never_shows(served: Served, stream: bool) -> None:
    body = COUNT | {"stop": ["10, 11,"], "stream": stream}
    answer = served.http.post("/v1/completions", json=body)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(event)["choices"][0] for event in events] if stream else answer.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == " 6, 7, 8, 9, "
    assert choices[-1]["finish_reason"] == "stop"


def test_a_request_runs_in_the_pool_it_asks_for(served: Served) -> None:
    wait_for(lambda: not any(pool["running"] for pool in served.stats().values()))
    before = served.stats()
    assert served.http.post("/v1/completions", json=COUNT | {"policy": "retract"}).status_code == 200
    wait_for(lambda: served.stats()["retract"]["generated_tokens"] == before["retract"]["generated_tokens"] + 24)
    assert served.stats()["preemption"] == before["preemption"]


def test_a_streamed_chat_joins_to_the_plain_one(served: Served) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Say hi."}], "temperature": 0, "max_tokens": 12}
    plain = served.http.post("/v1/chat/completions", json=body).json()
    with served.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    texts = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(texts) == plain["choices"][0]["message"]["content"]
    assert len(texts) > 1


def test_only_requests_with_the_same_cache_salt_share_cached_blocks(served: Served) -> None:
    """64 tokens are four blocks, and the last token is always computed: three blocks can be found."""
    body = {
        "model": MODEL,
        "prompt": list(range(1000, 1064)),
        "temperature": 0,
        "max_tokens": 4,
        "policy": "preemption",
    }
    salts: list[dict[str, str]] = [{"cache_salt": "a"}, {"cache_salt": "b"}, {}, {"cache_salt": "a"}]
    answers = [served.http.post("/v1/completions", json=body | salt).raise_for_status().json() for salt in salts]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[:3] == [0, 0, 0]
    assert cached[3] >= 48
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1


def test_an_answer_follows_the_schema_that_was_asked_for(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "How many balloons, and of which colour?"}],
        "max_tokens": 60,
        "seed": 5,
        "n": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "balloons", "schema": schema}},
    }
    answer = served.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    for choice in answer["choices"]:
        found = json.loads(choice["message"]["content"])
        assert set(found) == {"colour", "count"} and found["colour"] in ("red", "blue") and 0 <= found["count"] <= 99
        assert choice["finish_reason"] == "stop"


def test_an_unknown_model_is_404(served: Served) -> None:
    answer = served.http.post("/v1/completions", json=COUNT | {"model": "nope"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_400_and_names_the_field(served: Served, stream: bool) -> None:
    body = {"model": MODEL, "prompt": [1000] * 9000, "max_tokens": 1, "stream": stream}
    answer = served.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_client_that_leaves_frees_its_blocks(served: Served) -> None:
    with served.http.stream("POST", "/v1/completions", json=LONG | {"policy": "retract"}) as response:
        lines = response.iter_lines()
        next(lines)
        wait_for(lambda: served.stats()["retract"]["running"] == 1)
    wait_for(lambda: served.stats()["retract"]["running"] == 0)
    assert served.stats()["retract"]["kv_blocks_used"] == 0


def test_only_the_engines_load_torch(served: Served) -> None:
    def loads_torch(process: psutil.Process) -> bool:
        return any("torch" in library.path for library in process.memory_maps())

    engines, replicas = served.processes("ray::EngineActor"), served.processes("ray::ServeReplica")
    assert [loads_torch(process) for process in engines] == [True, True]
    assert [loads_torch(process) for process in replicas] == [False, False, False]


def test_serve_again_finds_it_running(served: Served) -> None:
    before = {process.pid for process in served.run.find()}
    again = serve(served.folder, DEFAULT, served.ports)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "runs already, with this very config" in again.stdout
    assert before <= {process.pid for process in served.run.find()}


def test_another_policy_setting_reaches_the_running_engines(served: Served) -> None:
    engines = {process.pid for process in served.processes("ray::EngineActor")}
    changed = served.folder / "changed.yaml"
    changed.write_text(DEFAULT.read_text().replace("max_num_seqs: 64", "max_num_seqs: 2"))
    again = serve(served.folder, changed, served.ports)
    assert again.returncode == 0, again.stdout + again.stderr
    assert {process.pid for process in served.processes("ray::EngineActor")} == engines
    answers = [served.http.post("/v1/completions", json=COUNT | {"policy": "retract"}) for _ in range(2)]
    assert all(answer.status_code == 200 for answer in answers)


def test_another_policy_takes_over_while_an_answer_runs(served: Served) -> None:
    document = yaml.safe_load(DEFAULT.read_text())
    (pool,) = [part for part in document["applications"][0]["deployments"] if part["name"] == "retract"]
    pool["user_config"] = {"policy": {"kind": "static"}}
    changed = served.folder / "static.yaml"
    changed.write_text(yaml.safe_dump(document))
    body = COUNT | {"policy": "retract", "max_tokens": 400, "ignore_eos": True}
    undisturbed = served.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with served.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        lines = answer.iter_lines()
        texts = [json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]]
        again = serve(served.folder, changed, served.ports)
        texts += [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
    assert again.returncode == 0, again.stdout + again.stderr
    assert served.stats()["retract"]["policy"] == "static"
    assert "".join(texts) == undisturbed


def test_a_dead_engine_ends_its_streams_and_is_replaced(served: Served) -> None:
    with served.http.stream("POST", "/v1/completions", json=LONG | {"policy": "retract"}) as response:
        lines = response.iter_lines()
        next(lines)
        busiest = max(served.processes("ray::EngineActor"), key=lambda process: process.cpu_percent(interval=0.5))
        busiest.kill()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    assert events.pop()["error"]["type"] == "server_error"
    assert all(event["choices"][0]["finish_reason"] is None for event in events)

    def answers(pool: str) -> bool:
        return served.http.post("/v1/completions", json=COUNT | {"policy": pool}).status_code == 200

    assert answers("preemption")
    wait_for(lambda: answers("retract"))


def test_stop_lets_a_running_answer_end_and_leaves_nothing_behind(served: Served) -> None:
    run = served.run
    with served.http.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 60}) as response:
        lines = response.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        stopping = threading.Thread(target=stop, args=(served.folder, served.ports[0]))
        stopping.start()
        rest = [line.removeprefix("data: ") for line in lines if line]
    stopping.join()
    assert first["choices"][0]["finish_reason"] is None
    assert rest.pop() == "[DONE]"
    assert json.loads(rest.pop())["choices"][0]["finish_reason"] == "length"
    assert run.find() == []
    assert not run.temp_dir.exists()
    assert not run.file.exists()
    assert all(is_free(port) for port in served.ports)


def test_an_engine_that_cannot_start_is_told_with_its_cause(model_folder: Path, tmp_path: Path) -> None:
    wrong, ports = tmp_path / "wrong.yaml", free_ports()
    wrong.write_text(DEFAULT.read_text().replace("device: cpu\n", "device: cpu\n      max_model_len: 9999\n"))
    started = serve(tmp_path, wrong, ports)
    assert started.returncode == 1
    assert "max_model_len is 9999" in started.stderr
    assert "Write max_model_len: 8192" in started.stderr
    assert not list((tmp_path / ".sluice").glob("run-*"))
    assert all(is_free(port) for port in ports)
