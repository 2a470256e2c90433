"""Run directories with spaces, quotes and other unusual characters."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.launcher.failure import resume_command

NAMES = (
    *("a b", "#1", "100%t", "a:b", "ü", "日本", "~a", "(1)", "a,b", "[1]", "{1}", "a;b", "a&b"),
    *("it's", "$x", "a*b", "a?b", "a!b", "a<b", "a|b", '"q"', "a`b", "a\\", "#\\", 'a\\"b#', "🎉"),
    *("a=b", "a\tb", "-a", "@a"),
)


@pytest.mark.parametrize("name", NAMES)
def test_run_dir_keeps_unusual_characters(tmp_path: Path, name: str) -> None:
    directory = str(tmp_path / name)
    config = compose_config(["experiment=tiny_ppo", f"run.dir={directory}"])
    assert config.run.dir == directory
    again = compose_config([*shlex.split(resume_command(config))[2:]])
    assert (again.run.dir, again.run.name) == (directory, config.run.name)


@pytest.mark.parametrize("name", NAMES)
def test_default_run_dir_keeps_characters_of_cwd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    config = compose_config(["experiment=tiny_ppo", "run.name=mine"])
    assert config.run.dir == str(tmp_path / name / "runs" / "mine")


@pytest.mark.parametrize("character", ["\n", "\r"])
def test_run_dir_with_a_line_break_is_refused(tmp_path: Path, character: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.dir=.*must not contain the character '\\"):
        compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path}/a{character}b"])


def test_only_values_of_text_keys_are_quoted() -> None:
    with pytest.raises(ConfigError, match="expected one value"):
        compose_config(["experiment=tiny_ppo", "run.steps=1,2"])
    quoted = compose_config(["experiment=tiny_ppo", 'run.dir="/a, b"'])
    assert quoted.run.dir == "/a, b"
