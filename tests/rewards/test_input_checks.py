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
