"""`aligner validate` reads the first records, and looks up reward functions without an import."""

import json
import subprocess
import sys

import pytest

from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.rewards.input_checks import check_inputs, find_missing_function

GOOD = {"prompt": "1+1=", "answer": "2"}


def check(path, *overrides: str) -> list[str]:
    config = compose_config(["experiment=tiny_ppo", f"data.path={path}", *overrides])
    return check_inputs(config, {})


def write_records(path, records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(
    "function, valid, invalid, message",
    [
        ("exact_match", {"answer": "2"}, {}, "lacks field `answer`"),
        ("gsm8k", {"answer": "#### 2"}, {"answer": "two"}, "must contain a number"),
        ("math", {"answer": "2"}, {}, "lacks field `answer`"),
        ("format", {"format": "a+"}, {"format": "a("}, "not a valid regular expression"),
        ("length", {"max_length": 3}, {"max_length": "3"}, "must be a number of characters"),
    ],
)
def test_missing_field_of_built_in_function_is_an_error(
    tmp_path, function, valid, invalid, message
):
    path = tmp_path / "records.jsonl"
    write_records(path, [{"prompt": "1+1=", **valid}])
    assert check(path, f"reward.function={function}") == []

    write_records(path, [{"prompt": "1+1=", **valid}, {"prompt": "2+2=", **invalid}])
    error = rf"reward\.function={function}: 1 of 2 records .*\n.*records\.jsonl:2: .*{message}"
    with pytest.raises(ConfigError, match=error):
        check(path, f"reward.function={function}")


def test_malformed_record_is_an_error_unless_skipped(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(f'{json.dumps(GOOD)}\n{{"prompt":\n')
    with pytest.raises(ConfigError, match=r"records\.jsonl:2: not valid JSON"):
        check(path)
    assert check(path, "data.skip_bad_records=true") == []


def test_record_without_prompt_is_an_error(tmp_path):
    path = tmp_path / "records.jsonl"
    write_records(path, [GOOD, {"prompt": " ", "answer": "2"}])
    with pytest.raises(ConfigError, match=r"records\.jsonl:2: field `prompt` is empty"):
        check(path)


def test_only_first_records_of_large_file_are_checked(tmp_path):
    path = tmp_path / "records.jsonl"
    write_records(path, [GOOD] * 1000)
    assert check(path, "reward.function=exact_match") == []

    write_records(path, [*[GOOD] * 1000, {"prompt": "no answer"}])
    (notice,) = check(path, "reward.function=exact_match")
    assert notice.startswith(f"data.path={path}: checked the first 1,000 records")


def test_misspelt_built_in_function_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"reward\.function=gsm8: did you mean gsm8k\?"):
        config = compose_config(["experiment=tiny_ppo", "reward.function=gsm8"])
        check_inputs(config, {})


def test_misspelt_custom_function_gets_a_suggestion(tmp_path, monkeypatch):
    package = tmp_path / "input_check_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "rewards.py").write_text(
        "raise RuntimeError('imported')\ndef accuracy(requests): ...\nother = accuracy\n"
    )
    (package / "broken.py").write_text("def accuracy(:\n")
    (package / "dynamic.py").write_text("from math import *\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert find_missing_function("input_check_package.rewards:accuracy") is None
    assert find_missing_function("input_check_package.rewards:other") is None
    assert find_missing_function("input_check_package.dynamic:sqrt") is None
    misspelt = find_missing_function("input_check_package.rewards:acuracy")
    assert misspelt is not None
    assert misspelt.endswith("did you mean input_check_package.rewards:accuracy?")
    broken = find_missing_function("input_check_package.broken:accuracy")
    assert broken is not None and "broken.py:1: SyntaxError" in broken
    missing = find_missing_function("input_check_package.reward:accuracy")
    assert missing is not None and missing.startswith("no module named")


def test_validate_fails_on_missing_field_without_torch(tmp_path):
    path = tmp_path / "records.jsonl"
    write_records(path, [GOOD, {"prompt": "2+2="}])
    code = (
        "import sys; from aligner.cli import main\ntry: main()\nfinally: assert 'torch' not in"
        " sys.modules, 'torch'"
    )
    arguments = [
        "validate",
        "experiment=tiny_ppo",
        f"data.path={path}",
        "reward.function=exact_match",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert "records.jsonl:2: record lacks field `answer`" in done.stderr


TRL_FUNCTION = "def accuracy(prompts, completions, answer, unit=None, **kwargs): ...\n"


def test_missing_parameter_of_custom_function_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "trl_reward.py").write_text(TRL_FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "records.jsonl"
    write_records(path, [GOOD, {"prompt": "2+2=", "answer": None}])
    assert check(path, "reward.function=trl_reward:accuracy") == []

    write_records(path, [GOOD, {"prompt": "2+2=", "solution": "4"}])
    with pytest.raises(
        ConfigError, match=r"1 of 2 records lack .*\n.*records\.jsonl:2: .*`answer`"
    ):
        check(path, "reward.function=trl_reward:accuracy")


def test_reasoning_gym_requires_question(tmp_path):
    path = tmp_path / "records.jsonl"
    write_records(path, [GOOD])
    with pytest.raises(ConfigError, match=r"records\.jsonl:1: record lacks field `question`"):
        check(path, "reward.function=reasoning_gym")


def test_evaluation_records_are_checked(tmp_path):
    path, held_out = tmp_path / "records.jsonl", tmp_path / "held_out.jsonl"
    write_records(path, [GOOD])
    suite = [
        "evaluation.every=1",
        f"+evaluation.suites.sums={{path: {held_out}, function: exact_match}}",
    ]
    write_records(held_out, [GOOD, {"prompt": "2+2="}])
    message = r"evaluation\.suites\.sums\.function=exact_match: .*\n.*held_out\.jsonl:2: "
    with pytest.raises(ConfigError, match=message):
        check(path, *suite)

    held_out.write_text("{\n")
    with pytest.raises(ConfigError, match=r"held_out\.jsonl:1: not valid JSON"):
        check(path, *suite)

    write_records(held_out, [{"text": 1}])
    with pytest.raises(ConfigError, match=r"held_out\.jsonl:1: record lacks field `prompt`"):
        check(path, *suite)


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    "overrides, valid, invalid, message",
    [
        (["sft"], {"prompt": "a", "response": "b"}, {"prompt": "a"}, "lacks field `response`"),
        (["dpo"], PAIR, {"prompt": "a", "chosen": "b"}, "lacks field `rejected`"),
        (["dpo"], PAIR, {**PAIR, "margin": -1}, "field `margin` is -1"),
        (
            ["dpo", "algorithm.preference.kind=kto"],
            {"prompt": "a", "response": "b", "label": True},
            {"prompt": "a", "response": "b"},
            "field `label` is None",
        ),
        (
            ["sft"],
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {"messages": [{"role": "user", "content": "a"}]},
            "the last message has role 'user'",
        ),
        (
            ["reward_model"],
            {"prompt": "a", "steps": ["b"], "labels": [1]},
            {"prompt": "a", "steps": ["b"], "labels": []},
            "`labels` is an empty list",
        ),
    ],
)
def test_offline_records_are_checked(tmp_path, overrides, valid, invalid, message):
    path = tmp_path / "records.jsonl"
    algorithm, *settings = overrides
    write_records(path, [valid])
    assert check(path, f"algorithm={algorithm}", *settings) == []

    write_records(path, [valid, invalid])
    with pytest.raises(ConfigError, match=rf"records\.jsonl:2: .*{message}"):
        check(path, f"algorithm={algorithm}", *settings)


def test_misspelt_environment_and_tool_are_errors(tmp_path):
    path = tmp_path / "records.jsonl"
    write_records(path, [GOOD])
    target = "tests.agents.acting:Missing"
    with pytest.raises(ConfigError, match=r"environment\.target=tests\.agents\.acting:Missing: "):
        check(path, f"environment.target={target}")
