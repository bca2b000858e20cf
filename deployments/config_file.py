"""Reads the Serve config file and checks all of it, so that nothing starts that cannot work."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray.serve.schema import ServeDeploySchema

from deployments.config import INGRESS, AppConfig, UserConfig, merged, parse
from deployments.explain import Problem, closest, explain
from deployments.yaml_lines import Place, YamlFile, read_yaml
from engine.config import EngineConfig
from engine.errors import ConfigError

IMPORT_PATH = "deployments.app:build"
# What a user might look for under `engine`, and where it stands instead.
ELSEWHERE = {
    "model": "args.model, one for all pools",
    "model_cache": "args.model_cache, one for all pools",
    "policy": "user_config.policy of the pool's deployment, where it can be changed without a restart",
}


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A config file that was found right."""

    path: Path
    document: dict[str, Any]
    application: str
    app: AppConfig

    @property
    def http_host(self) -> str:
        return str(self.document.get("http_options", {}).get("host", "0.0.0.0"))

    @property
    def http_port(self) -> int:
        return int(self.document.get("http_options", {}).get("port", 8000))


def load(path: Path) -> ClusterConfig:
    """Raises ConfigError that lists every mistake of the file with its line and what to write there."""
    file = read_yaml(path)
    problems = explain(ServeDeploySchema, file.data)
    _raise_for(file, problems)
    index = _application(file)
    application = file.data["applications"][index]
    _raise_for(file, list(_application_problems(application, ("applications", index))))
    return ClusterConfig(path, file.data, application.get("name", "default"), parse(application.get("args", {})))


def _application(file: YamlFile) -> int:
    ours = [i for i, entry in enumerate(file.data["applications"]) if entry.get("import_path") == IMPORT_PATH]
    if len(ours) != 1:
        count = len(ours)
        problem = Problem(("applications",), f"has {count} entries with this import_path; it needs exactly one.")
        raise ConfigError(f"{problem.render(file)}\n    write:   import_path: {IMPORT_PATH}")
    return ours[0]


def _application_problems(application: dict[str, Any], at: Place) -> Iterator[Problem]:
    problems = explain(AppConfig, application.get("args", {}), (*at, "args"))
    yield from problems
    if problems:
        return
    app = AppConfig.model_validate(application["args"])
    pools, entries = (*at, "args", "pools"), (*at, "deployments")
    yield from _misplaced(app.engine, (*at, "args", "engine"))
    for index, pool in enumerate(app.pools):
        yield from _misplaced(pool.engine, (*pools, index, "engine"))
    yield from _engine_problems(app, (*at, "args"))
    yield from _taken_names(app, pools)
    yield from _entry_problems(app, application.get("deployments", []), entries)


def _misplaced(engine: dict[str, Any], at: Place) -> Iterator[Problem]:
    for key in (key for key in engine if key in ELSEWHERE):
        yield Problem((*at, key), f"does not go here but to {ELSEWHERE[key]}.")


def _engine_problems(app: AppConfig, at: Place) -> Iterator[Problem]:
    """Each pool's engine is checked as merged from two places; a mistake is shown where it stands, once."""
    seen = set()
    for index, pool in enumerate(app.pools):
        for problem in explain(EngineConfig, merged(app.engine, pool.engine)):
            home = ("pools", index, "engine") if _has(pool.engine, problem.place) else ("engine",)
            place = (*at, *home, *problem.place)
            if place not in seen:
                seen.add(place)
                yield replace(problem, place=place)


def _taken_names(app: AppConfig, at: Place) -> Iterator[Problem]:
    taken = {INGRESS}
    for index, pool in enumerate(app.pools):
        if pool.name in taken:
            yield Problem((*at, index, "name"), f"is {pool.name!r}, which is taken.")
        taken.add(pool.name)


def _entry_problems(app: AppConfig, entries: list[dict[str, Any]], at: Place) -> Iterator[Problem]:
    """Pools and entries under `deployments` must match, name by name."""
    pools = [pool.name for pool in app.pools]
    for index, entry in enumerate(entries):
        if entry["name"] in pools:
            yield from _user_config_problems(entry, (*at, index))
        elif entry["name"] != INGRESS:
            place, names = (*at, index, "name"), [*pools, INGRESS]
            fix = f"- name: {close}" if (close := closest(entry["name"], names)) else ""
            yield Problem(place, f"is {entry['name']!r}, which is no pool of args.pools.", ", ".join(names), fix)
    named = {entry["name"] for entry in entries}
    for name in (name for name in pools if name not in named):
        fix = f"- {{name: {name}, user_config: {{policy: {{kind: preemption}}}}}}"
        yield Problem(at, f"has no entry for the pool {name!r} of args.pools.", fix=fix)


def _user_config_problems(entry: dict[str, Any], place: Place) -> Iterator[Problem]:
    if entry.get("user_config") is None:
        fix = "user_config: {policy: {kind: preemption}}"
        yield Problem((*place, "user_config"), "is missing: it says which policy the pool runs.", fix=fix)
    else:
        yield from explain(UserConfig, entry["user_config"], (*place, "user_config"))


def _raise_for(file: YamlFile, problems: list[Problem]) -> None:
    if problems:
        raise ConfigError("\n".join(problem.render(file) for problem in problems))


def _has(fields: Any, place: Place) -> bool:
    for step in place:
        if not isinstance(fields, dict) or step not in fields:
            return False
        fields = fields[step]
    return True
