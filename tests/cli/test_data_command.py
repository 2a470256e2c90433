"""Tests of `aligner data`: it shows what a launch would train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aligner.cli import main
from aligner.config.compose import compose_config
from aligner.data.examples import open_run_data
from aligner.data.tokenizer import Tokenizer
from aligner.schema.keys import with_values
from benchmarks.data_files import write_chat_model

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 plus 2?"},
    {"role": "assistant", "content": "3."},
    {"role": "user", "content": "Are you sure?"},
    {"role": "assistant", "content": "Yes."},
]
QUESTIONS = [{"question": f"What is {n} plus 1?", "answer": f"{n + 1}"} for n in range(5)]
PAIR = {
    "prompt": "Hi",
    "chosen": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
    "rejected": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "What?"}],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory of a model with a chat template."""
    directory = tmp_path_factory.mktemp("data") / "model"
    write_chat_model(directory)
    return str(directory)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a file of records, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return Path("records.jsonl")


def write(file: Path, records: list[Any]) -> None:
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    """Run `aligner data`; return its standard output and standard error."""
    with pytest.raises(SystemExit, match=rf"^{code}$"):
        main(["data", "records.jsonl", *arguments])
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_marked_tokens_are_those_that_a_launch_trains_on(
    file: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, [{"messages": CHAT}])
    overrides = [f"model.path={model}", "algorithm=sft", "data.learned_turns=all"]
    output, _ = run(capsys, *overrides)
    assert "⟦3.<|im_end|>⟧\n" in output and "⟦Yes.<|im_end|>⟧\n" in output
    assert "roles: system, user, assistant, user, assistant" in " ".join(output.split())

    shown = json.loads(run(capsys, *overrides, "--json")[0])["first"][0]["texts"][0]
    config = with_values(compose_config(overrides), {"data.path": str(file)})
    config = with_values(config, {"data.max_prompt_tokens": 99, "data.max_response_tokens": 99})
    [example] = open_run_data(config, Tokenizer(Path(model))).examples.take(0, 1)
    assert shown["tokens"] == example.tokens.tolist()
    assert shown["loss_mask"] == example.loss_mask.int().tolist()


def test_colors_replace_the_marks(
    file: Path, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    write(file, [{"messages": CHAT}])
    output, _ = run(capsys, f"model.path={model}")
    assert "\x1b[1;32mYes.<|im_end|>\x1b[0m" in output and "⟦" not in output


def test_prompts_are_shown_with_fields_of_the_reward(
    file: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, QUESTIONS)
    output, error = run(capsys, f"model.path={model}", "--limit", "1")
    assert "fields    prompt = question\n" in output
    assert "read for  algorithm=grpo, because the records have prompts" in output
    assert '    What is 0 plus 1?\n  to the reward: answer = "1"\n' in output
    assert "records   5: 5 used\n" in output
    assert "record 2" not in output
    assert "chat template" in error and "not applied" in error


def test_texts_are_shown_without_a_model(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(file, [PAIR, PAIR])
    output, _ = run(capsys)
    assert "ultrafeedback: `prompt` is a text" in output
    assert "add\n          model.path=MODEL for tokens" in output
    assert "    user: Hi\n    assistant: ⟦Hello⟧\n" in output
    assert "chosen, 7 characters: 2 of the prompt, 5 with a loss" in output
    assert "assistant: ⟦What?⟧" in output


def test_pairs_have_a_mask_for_each_response(
    file: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, [PAIR])
    output, _ = run(capsys, f"model.path={model}")
    assert "⟦Hello<|im_end|>⟧" in output and "⟦What?<|im_end|>⟧" in output


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("drop", ("5 dropped", "are skipped (data.long_prompts=drop)")),
        ("cut_start", ("5 cut", "lose the start of the prompt")),
    ],
)
def test_summary_names_consequence_of_long_prompts(
    file: Path,
    model: str,
    capsys: pytest.CaptureFixture[str],
    setting: str,
    expected: tuple[str, str],
) -> None:
    write(file, QUESTIONS)
    limits = ("data.max_prompt_tokens=4", f"data.long_prompts={setting}")
    output, _ = run(capsys, f"model.path={model}", *limits)
    text = " ".join(output.split())
    assert f"records 5: {expected[0]}" in text
    assert "5 exceed data.max_prompt_tokens=4, which" in text and expected[1] in text


def test_invalid_record_is_named_with_its_line(
    file: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, QUESTIONS[:2])
    with file.open("a") as stream:
        stream.write('\n{"question": \n')
    output, error = run(capsys, f"model.path={model}", code=2)
    assert "records   3: 2 used, 1 invalid; 1 empty lines\n" in output
    assert "error: records.jsonl:4: not valid JSON" in error
    assert "1 of 3 records are invalid" in error
    # A launch skips the record with this setting.
    run(capsys, f"model.path={model}", "data.skip_bad_records=true")


def test_missing_file_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "records.jsonl: no such file" in run(capsys, code=2)[1]


def test_lines_fit_in_60_columns_and_contain_no_control_characters(
    file: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "one two three\x1b[31m " * 80 + "end"
    write(file, [{"prompt": prompt, "answer": "word " * 200}])
    output, _ = run(capsys, f"model.path={model}")
    assert max(map(len, output.splitlines())) <= 60
    assert "\x1b" not in output and r"\x1b[31m" in output
    assert "(--full shows them)" in " ".join(output.split())
    assert output.count("three") < run(capsys, "--full")[0].count("three")


def test_format_and_experiment_are_those_of_a_launch(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, [{"prompt": "1+1=", "label": "2"}])
    output, _ = run(capsys, "experiment=tiny_ppo", "--json")
    [record] = json.loads(output)["first"]
    assert record["fields"] == {"label": "2", "answer": "2"} and record["prompt_length"] == 4
    output, _ = run(capsys, "experiment=tiny_ppo", "data.format=none", "--json")
    assert json.loads(output)["first"][0]["fields"] == {"label": "2"}
