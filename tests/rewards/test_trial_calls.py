"""Trial calls of the user's scoring functions in `prepare`, before any server starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.training.prepare import prepare_run

FUNCTIONS = """
import json, time, urllib.request

def accuracy(prompts, completions, answer, **kwargs):
    return [float(text == right) for text, right in zip(completions, answer)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)

def parse(text):
    return json.loads(text)["score"]

def strict(requests):
    return [parse(request.response) for request in requests]

def one_number(requests):
    return 1.0

def hangs(requests):
    time.sleep(1000)

def asks_service(requests):
    urllib.request.urlopen("http://127.0.0.1:9/")

def steps(requests):
    return [[(1, 0.5)] for _ in requests]
"""
RECORDS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module with scoring functions."""
    (tmp_path / "trial_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "trial_functions"


def prepare(tmp_path: Path, function: str, *overrides: str, records: object = RECORDS) -> None:
    data = tmp_path / "data.jsonl"
    assert isinstance(records, list)
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = [f"run.dir={tmp_path / 'run'}", f"data.path={data}", f"reward.function={function}"]
    prepare_run(compose_config(["experiment=tiny_ppo", *settings, *overrides]))


@pytest.mark.parametrize(
    "function, overrides, form, scores",
    [
        (
            "accuracy",
            [],
            r"TRL's form accuracy\(prompts, completions, answer, \*\*kwargs\)",
            "1 and 0",
        ),
        ("compute_score", [], r"verl's form compute_score\(data_source, .*\)", "1 and 0"),
        (
            "steps",
            ["reward.step_rewards=true"],
            r"aligner's form steps\(requests\)",
            "1 step and 1 step",
        ),
    ],
)
def test_form_and_scores_are_printed(
    tmp_path: Path,
    module: str,
    capfd: pytest.CaptureFixture[str],
    function: str,
    overrides: list[str],
    form: str,
    scores: str,
) -> None:
    prepare(tmp_path, f"{module}:{function}", *overrides)
    pattern = (
        rf"reward function {module}:{function}: {form}; trial call on .*data\.jsonl:1 returned"
        rf" {scores} in [\d.]+ ms"
    )
    assert re.search(pattern, capfd.readouterr().err)


def test_exception_is_reported_with_its_traceback(tmp_path: Path, module: str) -> None:
    with pytest.raises(ConfigError) as raised:
        prepare(tmp_path, f"{module}:strict")
    error = str(raised.value)
    assert error.startswith(f"reward.function={module}:strict: the trial call on ")
    assert "TypeError in trial_functions.py:11" in error
    assert 'return json.loads(text)["score"]' in error
    assert "child_function.py" not in error


def test_single_number_is_an_error(tmp_path: Path, module: str) -> None:
    with pytest.raises(ConfigError, match="returned float for 2 responses; must return a list"):
        prepare(tmp_path, f"{module}:one_number")


def test_slow_function_does_not_stop_the_start(
    tmp_path: Path, module: str, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, f"{module}:hangs", "reward.function_timeout_s=0.5")
    assert (
        "returned no result within 0.5 s and was killed; the run starts" in capfd.readouterr().err
    )


def test_missing_service_does_not_stop_the_start(
    tmp_path: Path, module: str, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, f"{module}:asks_service")
    assert "reached no service: URLError in trial_functions.py" in capfd.readouterr().err


def test_field_that_a_function_requires_is_checked_for_all_records(
    tmp_path: Path, module: str
) -> None:
    records = [*RECORDS, {"prompt": "3+3=", "solution": "6"}]
    message = r"1 of 3 records lack .*\n.*data\.jsonl:3: record lacks field `answer`"
    with pytest.raises(ConfigError, match=message):
        prepare(tmp_path, f"{module}:accuracy", records=records)

    # The check is repeated for a function with other parameters, although the data are the same.
    (tmp_path / "trial_functions.py").write_text("def accuracy(completions): return [1.0, 1.0]\n")
    prepare(tmp_path, f"{module}:accuracy", records=records)
