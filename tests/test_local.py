"""Serving on this machine: nothing starts that cannot work, and `stop` ends what was started and nothing else."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from deployments import local_ray, local_serve
from deployments.config_file import load
from deployments.local import main
from deployments.local_dashboard import progress_of, raise_failure
from deployments.local_deploy import render
from deployments.local_ports import Ports, check_free, free_port
from deployments.local_ray import environment
from deployments.local_run import TOKEN, Run, new_run, saved_run
from engine.errors import ConfigError, EngineUnavailable

DEFAULT = Path(__file__).parents[1] / "cluster" / "config.yaml"
SLEEP = "import time; print(flush=True); time.sleep(600)"
# A parent that carries the token, and a child that does not.
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], env={{}})
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, so that no state is shared with a run of the user's."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = new_run(tmp_path / "run-1.json", Ports(1, 2, 3, 4))
    yield run
    run.stop()


@pytest.fixture
def foreigner() -> Iterator[psutil.Process]:
    """A process of somebody else's run."""
    with _python(SLEEP, {TOKEN: "another"}) as process:
        yield psutil.Process(process.pid)
        process.kill()


def _python(code: str, environ: dict[str, str]) -> subprocess.Popen[str]:
    """A Python process that runs `code` and has printed its first line."""
    return subprocess.Popen([sys.executable, "-c", code], env=os.environ | environ, stdout=subprocess.PIPE, text=True)


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _ports(**changes: int) -> Ports:
    return replace(Ports(free_port(), free_port(), free_port(), free_port()), **changes)


def _gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_free_ports_pass() -> None:
    check_free(_ports())


def test_a_busy_port_is_told_with_its_holder_and_the_variable(busy_port: int) -> None:
    with pytest.raises(ConfigError) as caught:
        check_free(_ports(dashboard=busy_port))
    said = caught.value.message
    assert f"Port {busy_port} for the Ray dashboard is in use by process {os.getpid()}" in said
    assert "DASHBOARD_PORT=" in said
    assert "HTTP_PORT" not in said


def test_all_busy_ports_are_told_at_once(busy_port: int) -> None:
    with pytest.raises(ConfigError, match=r"HTTP_PORT=[\s\S]*needed twice|needed twice[\s\S]*HTTP_PORT="):
        check_free(_ports(http=busy_port, metrics=busy_port))


def test_serve_refuses_a_busy_port_before_anything_starts(
    elsewhere: Path, busy_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--config", str(DEFAULT), "--http-port", str(busy_port)]) == 1
    assert f"Port {busy_port} for the HTTP API is in use" in capsys.readouterr().err
    assert not list(elsewhere.iterdir())


def test_serve_refuses_an_unknown_key_before_anything_starts(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "wrong.yaml").write_text(DEFAULT.read_text().replace("max_num_seqs", "max_num_sequences"))
    assert main(["serve", "--config", "wrong.yaml"]) == 1
    assert "write:   max_num_seqs: 64" in capsys.readouterr().err
    assert [path.name for path in elsewhere.iterdir()] == ["wrong.yaml"]


def test_stop_and_status_without_a_run_say_so(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "--http-port", "5"]) == 0
    assert main(["status", "--http-port", "5"]) == 3
    assert capsys.readouterr().out.count("Nothing of ours runs on port 5.") == 2


@pytest.mark.parametrize("command", ["serve", "stop", "status", "fetch"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([command, "--help"])
    assert "--config" in capsys.readouterr().out


def test_stop_ends_what_carries_the_token_and_its_children(run: Run, foreigner: psutil.Process) -> None:
    with _python(PARENT, {TOKEN: run.token}) as parent:
        child = int(_first_line(parent))
        assert {process.pid for process in run.find()} == {parent.pid, child}
        assert run.stop() == 2
    assert _gone(child)
    assert foreigner.is_running()


def test_stop_ends_a_known_process_that_lost_its_token(run: Run, foreigner: psutil.Process) -> None:
    with _python(SLEEP, {TOKEN: ""}) as process:
        born = psutil.Process(process.pid).create_time()
        assert replace(run, processes=((process.pid, born),)).stop() == 1
    assert foreigner.is_running()


def test_stop_spares_a_newer_process_with_a_known_pid(run: Run, foreigner: psutil.Process) -> None:
    assert replace(run, processes=((foreigner.pid, foreigner.create_time() - 100),)).stop() == 0
    assert foreigner.is_running()


def test_stop_takes_the_temporary_folder_and_the_file_along(run: Run) -> None:
    run.save()
    run.stop()
    assert not run.temp_dir.exists()
    assert not run.file.exists()


def test_a_failed_start_is_stopped_even_if_its_logs_vanish(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanish(*_: object, **__: object) -> None:
        raise shutil.Error([("raylet.log", "kept", "No such file")])

    def fail(*_: object) -> None:
        raise ConfigError("no such model")

    monkeypatch.setattr(shutil, "copytree", vanish)
    monkeypatch.setattr(local_ray, "start", fail)
    with _python(SLEEP, {TOKEN: run.token}) as process:
        _first_line(process)
        with pytest.raises(ConfigError, match="no such model"):
            local_serve._start(load(DEFAULT), run, 1.0)
        process.wait(10)
    assert not run.file.exists()


def test_a_run_is_found_again_as_it_was_saved(run: Run) -> None:
    with _python(SLEEP, {TOKEN: run.token}) as process:
        _first_line(process)
        known = replace(run, config_digest="abc").with_processes()
        known.save()
        assert saved_run(run.file) == known
        run.stop()


def test_a_dead_run_is_cleared_away(run: Run) -> None:
    run.save()
    assert saved_run(run.file) is None
    assert not run.temp_dir.exists()


def test_rays_environment_is_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://production:10001")
    environ = environment(run)
    assert "RAY_ADDRESS" not in environ
    assert environ[TOKEN] == run.token


def test_the_file_itself_is_deployed_if_the_port_is_as_it_says(tmp_path: Path) -> None:
    assert render(load(DEFAULT), 8000, tmp_path) == DEFAULT


def test_another_port_gives_a_copy_that_differs_in_the_port_alone(tmp_path: Path) -> None:
    config = load(DEFAULT)
    copy = yaml.safe_load(render(config, 8001, tmp_path).read_text())
    assert copy["http_options"].pop("port") == 8001
    del config.document["http_options"]["port"]
    assert copy == config.document


def _details(**changes: Any) -> dict[str, Any]:
    """What Serve tells of an application with one deployment that starts."""
    deployment = {
        "status": "UPDATING",
        "status_trigger": "CONFIG_UPDATE_STARTED",
        "message": "",
        "target_num_replicas": 2,
        "replicas": [{"state": "RUNNING"}, {"state": "STARTING"}],
    }
    return {"status": "DEPLOYING", "message": "", "deployments": {"first": deployment | changes}}


def test_progress_counts_the_replicas_that_are_up() -> None:
    assert [str(progress) for progress in progress_of(_details())] == ["first: updating, 1 of 2 replicas are up"]
    raise_failure(_details())


def test_a_replica_that_fails_to_start_is_told_at_its_first_try() -> None:
    details = _details(message="A replica failed to start with exception. Retrying. Error:\nOSError: disk is full")
    with pytest.raises(EngineUnavailable, match=r"first did not start:\nA replica failed [\s\S]*disk is full"):
        raise_failure(details)


def test_of_an_error_of_ours_only_the_sentence_is_told() -> None:
    traceback = "File x\nengine.errors.ConfigError: dtype is wrong.\nWrite another.\n\nThe above exception was\n"
    with pytest.raises(EngineUnavailable) as caught:
        raise_failure(_details(message=f"The deployment failed to start 3 times: {traceback}"))
    assert caught.value.message == "first did not start:\ndtype is wrong.\nWrite another."


def test_an_application_that_cannot_be_built_is_told_with_its_cause() -> None:
    with pytest.raises(EngineUnavailable, match="no module named x"):
        raise_failure({"status": "DEPLOY_FAILED", "message": "no module named x", "deployments": {}})
