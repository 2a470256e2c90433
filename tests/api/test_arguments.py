"""What Python gives as the command line has it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from aligner.api.arguments import (
    importable,
    json_lines,
    launch_arguments,
    override_text,
    place_records,
)
from aligner.config.compose import compose_config, group_options
from aligner.config.overrides import parse_override
from aligner.errors import ConfigError
from tests.system import scorers

NUMBERS = [3, 2.5e-3, True, None, [1, "a, b"], {"a": "b:c"}]
TEXTS = ["grpo", "true", "", "a b", 'say "hi"', "back\\slash\\", 'x\\"', "{", "$x"]


def overrides(**given: Any) -> Sequence[str]:
    asked = {"model": None, "algorithm": None, "reward": None, "data": None, "keys": {}} | given
    return launch_arguments(**asked, options=group_options()).overrides


@pytest.mark.parametrize("value", NUMBERS + TEXTS, ids=repr)
def test_a_value_is_parsed_to_itself(value: Any) -> None:
    override = parse_override(override_text("seed", value), group_options())
    assert override.value() == value and type(override.value()) is type(value)


def test_a_dollar_brace_is_text() -> None:
    config = compose_config(
        ["experiment=tiny_ppo", override_text("data.path", "${oc.env:HOME}/x"), "run.name=a"]
    )
    assert config.data.path == "${oc.env:HOME}/x"


def test_models_rewards_and_data_are_options_of_groups_names_or_paths() -> None:
    texts = overrides(model="tiny_random", algorithm="grpo", reward="gsm8k", data="sums")
    assert texts == ("model=tiny_random", "algorithm=grpo", "reward.function=gsm8k", "data=sums")
    texts = overrides(model="org/name", reward="environment", data=Path("train.jsonl"))
    assert texts == ("model.path=org/name", "reward.function=environment", "data.path=train.jsonl")
    assert overrides(reward="combined") == ("reward=combined",)
    assert overrides(model=Path("tiny_random")) == ("model.path=tiny_random",)


def test_sections_are_their_keys_and_mappings_stay_one_value() -> None:
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


def test_records_and_data_frames_are_json_lines() -> None:
    records = [{"prompt": "ä", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    for data in (records, pd.DataFrame(records)):
        assert [json.loads(line) for line in json_lines(data).splitlines()] == records
    for wrong in ([1, 2], [{"prompt": object()}], 7):
        with pytest.raises(ConfigError, match="data: "):
            json_lines(wrong)  # type: ignore[arg-type]


def test_records_are_placed_in_the_run_directory_but_not_over_those_of_another_run(
    tmp_path: Path,
) -> None:
    file, texts = place_records(
        "{}\n", ["experiment=tiny_ppo", f"run.dir={tmp_path / 'run'}"], None
    )
    assert file == tmp_path / "run" / "data.jsonl" and file.read_text() == "{}\n"
    assert (
        texts == (f"data.path={file}", f"run.dir={tmp_path / 'run'}")
        and file.parent.stat().st_mode & 0o777 == 0o700
    )
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match="uses other records"):
        place_records("[]\n", [f"run.dir={tmp_path / 'run'}"], None)


def test_a_function_of_a_module_goes_by_its_name_and_its_module_is_found() -> None:
    function = next(
        value
        for value in vars(scorers).values()
        if getattr(value, "__module__", "") == scorers.__name__
    )
    assert importable(function) == (
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
def test_what_cannot_be_imported_is_refused_with_the_way_out(function: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        importable(function)
    assert function is print or "%%writefile my_reward.py" in str(error.value)


def test_a_function_of_the_notebook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def score(requests): return []", namespace)
    monkeypatch.setattr(sys.modules["__main__"], "score", namespace["score"], raising=False)
    with pytest.raises(ConfigError, match="this notebook or script") as error:
        importable(namespace["score"])
    assert "from my_reward import score" in str(error.value)
