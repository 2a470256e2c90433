"""Tests of the conversion of Python arguments to command-line overrides."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from aligner.api.arguments import (
    find_importable_name,
    launch_arguments,
    override_text,
    to_json_lines,
    write_records,
)
from aligner.config.compose import compose_config
from aligner.config.conf_files import find_config_sources, list_group_options
from aligner.config.overrides import parse_override
from aligner.errors import ConfigError
from tests.system import scorers

NUMBERS = [3, 2.5e-3, True, None, [1, "a, b"], {"a": "b:c"}]
TEXTS = ["grpo", "true", "", "a b", 'say "hi"', "back\\slash\\", 'x\\"', "{", "$x"]


def overrides(**given: Any) -> Sequence[str]:
    asked = {"model": None, "algorithm": None, "reward": None, "data": None, "keys": {}} | given
    return launch_arguments(
        **asked, options=list_group_options(find_config_sources(None))
    ).overrides


@pytest.mark.parametrize("value", NUMBERS + TEXTS, ids=repr)
def test_override_text_round_trips_value(value: Any) -> None:
    override = parse_override(
        override_text("seed", value), list_group_options(find_config_sources(None))
    )
    assert override.value() == value and type(override.value()) is type(value)


def test_interpolation_syntax_is_literal_text() -> None:
    config = compose_config(
        ["experiment=tiny_ppo", override_text("data.path", "${oc.env:HOME}/x"), "run.name=a"]
    )
    assert config.data.path == "${oc.env:HOME}/x"


def test_arguments_become_group_options_or_paths() -> None:
    texts = overrides(model="tiny_random", algorithm="grpo", reward="gsm8k", data="sums")
    assert texts == ("model=tiny_random", "algorithm=grpo", "reward.function=gsm8k", "data=sums")
    texts = overrides(model="org/name", reward="environment", data=Path("train.jsonl"))
    assert texts == ("model.path=org/name", "reward.function=environment", "data.path=train.jsonl")
    assert overrides(reward="combined") == ("reward=combined",)
    assert overrides(model=Path("tiny_random")) == ("model.path=tiny_random",)


def test_nested_sections_become_dotted_overrides() -> None:
    keys = {
        "run": {"steps": 3},
        "actor": {"optimizer": {"learning_rate": 1e-3}},
        "environment": {"arguments": {"size": 2}},
    }
    texts = overrides(keys={**keys, "experiment": "tiny_ppo", "run.name": "a"})
    assert texts == (
        "run.steps=3",
        "actor.optimizer.learning_rate=0.001",
        "environment.arguments={size: 2}",
        "experiment=tiny_ppo",
        "run.name=a",
    )


def test_records_and_data_frames_become_json_lines() -> None:
    records = [{"prompt": "ä", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    for data in (records, pd.DataFrame(records)):
        assert [json.loads(line) for line in to_json_lines(data).splitlines()] == records
    for wrong in ([1, 2], [{"prompt": object()}], 7):
        with pytest.raises(ConfigError, match="data: "):
            to_json_lines(wrong)  # type: ignore[arg-type]


def test_records_of_another_run_are_not_replaced(
    tmp_path: Path,
) -> None:
    file, texts = write_records(
        "{}\n", ["experiment=tiny_ppo", f"run.dir={tmp_path / 'run'}"], None
    )
    assert file == tmp_path / "run" / "data.jsonl" and file.read_text() == "{}\n"
    assert (
        texts == (f"data.path={file}", f"run.dir={tmp_path / 'run'}")
        and file.parent.stat().st_mode & 0o777 == 0o700
    )
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match="uses other records"):
        write_records("[]\n", [f"run.dir={tmp_path / 'run'}"], None)


def test_module_function_becomes_importable_name() -> None:
    function = next(
        value
        for value in vars(scorers).values()
        if getattr(value, "__module__", "") == scorers.__name__
    )
    assert find_importable_name(function) == (
        f"{scorers.__name__}:{function.__name__}",
        Path(__file__).parents[2],
    )


def nested() -> Any:
    def score(requests: Any) -> list[float]:
        return []

    return score


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda requests: [], "a lambda has no name"),
        (nested(), "the function is defined inside another function"),
        (print, "must be a function"),
    ],
)
def test_unimportable_function_is_refused(function: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        find_importable_name(function)
    assert function is print or "%%writefile my_reward.py" in str(error.value)


def test_notebook_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def score(requests): return []", namespace)
    monkeypatch.setattr(sys.modules["__main__"], "score", namespace["score"], raising=False)
    with pytest.raises(ConfigError, match="this notebook or script") as error:
        find_importable_name(namespace["score"])
    assert "from my_reward import score" in str(error.value)
