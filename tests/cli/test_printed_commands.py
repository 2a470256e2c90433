"""Tests of the commands that a launch prints at its end: they treat the run's data as the run did."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from aligner.agents.generate import plan_job
from aligner.cli.command_table import parse_arguments
from aligner.cli.stored_models import (
    RecordForm,
    _apply_generation_defaults,
    _find_prompt_settings,
    _find_run,
    _list_record_forms,
    _parse_fields,
    _read_prompts,
    _sampling_arguments,
    _select_overrides,
)
from aligner.config.compose import compose_config, save_config
from aligner.data.conversations import get_prompt_messages
from aligner.data.export import find_source
from aligner.data.prompts import open_evaluation_prompts, unwrap_message, wrap_in_message
from aligner.data.records import BadRecord, Record
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.evaluation_suites import parse_evaluation_suites
from aligner.schema.keys import with_values
from benchmarks.data_files import CHAT_TEMPLATE
from benchmarks.runs import python_path
from tests.agents.serving_model import served
from tests.byte_model import write_byte_model
from tests.data.published_data import write_published_data

NOTE = "the model has a chat template, which is not applied to plain-text prompts"
RECORDS: dict[str, dict[str, object]] = {
    "plain.jsonl": {"prompt": "What is 1 plus 2?", "answer": "3"},
    "chats.jsonl": {
        "conversation": [{"role": "user", "content": "What is 1 plus 2?"}],
        "answer": "3",
    },
}
PAIR = {
    "chosen": [
        {"role": "user", "content": "What is 1 plus 2?"},
        {"role": "assistant", "content": "3"},
    ],
    "rejected": [
        {"role": "user", "content": "What is 1 plus 2?"},
        {"role": "assistant", "content": "4"},
    ],
}
RECORDS["pairs.jsonl"] = PAIR
RECORDS["turns.jsonl"] = {"messages": PAIR["chosen"]}
RENDERED = "<|im_start|>user\nWhat is 1 plus 2?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a chat model and two files of prompts."""
    directory = tmp_path_factory.mktemp("printed")
    write_byte_model(directory / "model", "{% if style %}{{ style }}: {% endif %}" + CHAT_TEMPLATE)
    write_byte_model(directory / "base", None)
    write_published_data(directory)
    for name, record in RECORDS.items():
        (directory / name).write_text(f"{json.dumps(record)}\n" * 4)
    return directory


def aligner(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "aligner", *arguments],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def read_records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "prompt", "options"),
    [
        ("plain.jsonl", "What is 1 plus 2?", ()),
        (
            "chats.jsonl",
            f"brief: {RENDERED}",
            (
                "+data.fields={messages: conversation}",
                "+data.chat_template_kwargs={style: brief}",
                "rollout.temperature=0.9",
            ),
        ),
    ],
    ids=["plain", "chats"],
)
def test_printed_commands_treat_data_as_the_run(
    place: Path, data: str, prompt: str, options: tuple[str, ...]
) -> None:
    run = place / f"run of {data}"
    launched = aligner(
        place,
        "launch",
        *("model.path=model", "algorithm=grpo", f"data.path={data}"),
        *("reward.function=exact_match", "rollout.max_response_tokens=8", "run.steps=1"),
        f"run.dir={run}",
        *options,
    )
    assert launched.returncode == 0, launched.stderr
    assert {record["prompt"] for record in read_records(run / "samples.jsonl")} == {prompt}

    _, _, printed = launched.stdout.partition("next steps:")
    commands = [shlex.split(line, comments=True) for line in printed.strip().splitlines()]
    generate = next(words[1:] for words in commands if words[1] == "generate")
    evaluate = next(words[1:] for words in commands if words[1] == "evaluate")
    output = place / f"samples of {data}"
    done = aligner(place, *generate[:-1], str(output))
    assert done.returncode == 0, done.stderr
    records = read_records(output)
    assert [record["prompt"] for record in records] == [prompt] * 4
    assert max(len(record["tokens"]) for record in records) <= 8  # type: ignore[arg-type]
    assert done.stderr.count(NOTE) == (data == "plain.jsonl")

    done = aligner(place, *evaluate)
    assert done.returncode == 0, done.stderr
    assert "4 prompts, 4 responses" in done.stdout
    assert done.stderr.count(NOTE) == (data == "plain.jsonl")

    if data == "chats.jsonl":
        check_served_prompt(run, Tokenizer(place / "model").encode(prompt).numel())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "algorithm", "data", "prompt"),
    [
        ("model", "sft", "turns.jsonl", RENDERED),
        ("base", "sft", "alpaca_data.json", "Give one tip for staying healthy."),
        ("model", "dpo", "pairs.jsonl", RENDERED),
        (
            "base",
            "dpo",
            "hh_rlhf.jsonl.gz",
            "\n\nHuman: How do I boil an egg?\n\nAssistant: In water. How soft do you like it?"
            "\n\nHuman: Very soft.\n\nAssistant:",
        ),
    ],
)
def test_printed_command_samples_prompts_of_responses(
    place: Path, model: str, algorithm: str, data: str, prompt: str
) -> None:
    run = place / f"{algorithm} on {data}"
    keys = (f"model.path={model}", f"algorithm={algorithm}", f"data.path={data}", f"run.dir={run}")
    launched = aligner(place, "launch", *keys)
    assert launched.returncode == 0, launched.stderr
    _, _, printed = launched.stdout.partition("next steps:")
    commands = [shlex.split(line, comments=True) for line in printed.strip().splitlines()]
    generate = next(words[1:] for words in commands if words[1] == "generate")
    output = place / f"samples of {algorithm} on {data}"
    done = aligner(place, *generate[:-1], str(output))
    assert done.returncode == 0, done.stderr
    assert read_records(output)[0]["prompt"] == prompt


def test_prompt_of_a_pair_is_the_beginning_of_its_chosen_conversation() -> None:
    record = Record(PAIR, "pairs.jsonl:1")
    assert get_prompt_messages(record)["messages"] == PAIR["chosen"][:1]
    assert unwrap_message(record).values["prompt"] == "What is 1 plus 2?"


def check_served_prompt(run: Path, token_count: int) -> None:
    """Check that the endpoint of a run's model renders messages with the run's template settings."""
    messages = [{"role": "user", "content": "What is 1 plus 2?"}]
    body = {"model": "policy", "messages": messages, "max_tokens": 1}
    with served(run) as url:
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["prompt_tokens"] == token_count


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("train.jsonl", RecordForm({"prompt": "question"}, "slime")),
        ("held_out.jsonl", RecordForm({"messages": "dialog"}, "sharegpt")),
        ("other.jsonl", None),
    ],
)
def test_fields_of_the_runs_data_are_the_default(prompts: str, expected: RecordForm | None) -> None:
    run = compose_config(
        [
            "experiment=tiny_ppo",
            *("data.path=train.jsonl", "+data.fields={prompt: question}", "data.format=slime"),
            *("evaluation.every=1", "evaluation.path=held_out.jsonl"),
            *("+evaluation.fields={messages: dialog}", "evaluation.format=sharegpt"),
        ]
    )
    assert _list_record_forms(run).get(Path(prompts).absolute()) == expected


def plan(
    place: Path, prompts: str, run: Config | None, *overrides: str, option: str = "--raw"
) -> list[str]:
    """Return the texts of the prompts that `aligner generate` reads."""
    words = ["generate", str(place / "model"), "--prompts", str(place / prompts), option]
    parsed = parse_arguments([*words, "--output", "unused.jsonl", *overrides])
    _apply_generation_defaults(parsed)
    job = plan_job(
        find_source(parsed.source),
        _read_prompts(parsed, run),
        template=parsed.template,
        data=_find_prompt_settings(parsed, run),
        **_sampling_arguments(parsed),
    )
    return [prompt.text for prompt in job.prompts]


def test_prompt_boundaries_and_limits_are_those_of_the_run(place: Path) -> None:
    """The run's own data is cut like in the run; other data only by overrides."""
    for name in ("own.jsonl", "foreign.jsonl"):
        (place / name).write_text('{"prompt": "Q: 1+1= A"}\n{"prompt": "Q: 1 + 1 + 1 + 1= A"}\n')
    settings = {"data.path": str(place / "own.jsonl"), "data.prompt_after": "Q: "}
    settings |= {"data.prompt_before": " A", "data.max_prompt_tokens": 8}
    run = with_values(compose_config(["experiment=tiny_ppo"]), settings)

    drop = with_values(run, {"data.long_prompts": "drop"})
    assert plan(place, "own.jsonl", drop) == ["1+1="]
    cut = with_values(run, {"data.long_prompts": "cut_start"})
    first, second = plan(place, "own.jsonl", cut)
    assert first == "1+1=" and second != "1 + 1 + 1 + 1=" and "1 + 1 + 1 + 1=".endswith(second)
    with pytest.raises(ConfigError, match=r"own.jsonl:2: .*allowed: 1 to data.max_prompt_tokens=8"):
        plan(place, "own.jsonl", run)

    complete = ["Q: 1+1= A", "Q: 1 + 1 + 1 + 1= A"]
    assert plan(place, "foreign.jsonl", cut) == complete
    assert plan(place, "foreign.jsonl", None) == complete
    overrides = ["data.prompt_after='Q: '", "data.prompt_before=' A'"]
    assert plan(place, "foreign.jsonl", None, *overrides) == ["1+1=", "1 + 1 + 1 + 1="]
    limits = ["data.max_prompt_tokens=8", "data.long_prompts=drop"]
    assert plan(place, "foreign.jsonl", None, *overrides, *limits) == ["1+1="]
    # An override also applies to the run's own data.
    assert len(plan(place, "own.jsonl", drop, "data.max_prompt_tokens=60")) == 2


def test_bad_records_that_the_run_skips_are_skipped(place: Path) -> None:
    # the last prompt is not valid UTF-8
    records = ['{"prompt": "1+1="}', '{"text": "2"}', '{"prompt": "b \\ud83d"}']
    (place / "own.jsonl").write_text("".join(f"{record}\n" for record in records))
    run = with_values(
        compose_config(["experiment=tiny_ppo"]), {"data.path": str(place / "own.jsonl")}
    )
    with pytest.raises(ConfigError, match=r"own.jsonl:2: record lacks field `prompt`"):
        plan(place, "own.jsonl", run)
    skipping = with_values(run, {"data.skip_bad_records": True})
    assert plan(place, "own.jsonl", skipping) == ["1+1="]


def test_other_data_keys_are_refused(place: Path) -> None:
    words = ["generate", "model", "--prompts", "plain.jsonl", "--output", "unused.jsonl"]
    parsed = parse_arguments([*words, "data.shuffle=false"])
    with pytest.raises(ConfigError, match=r"data.shuffle: is not supported.*data.prompt_after"):
        _select_overrides(parsed, "generate", "environment")
    parsed = parse_arguments([*words, "data.prompt_after=x"])
    assert _select_overrides(parsed, "generate", "environment") == ([],)


@pytest.mark.parametrize(("use", "is_rendered"), [("auto", False), ("chat", True), ("raw", False)])
def test_suite_uses_the_chat_template_as_configured(
    place: Path, use: str, is_rendered: bool
) -> None:
    config = compose_config(
        [
            "experiment=tiny_ppo",
            *("evaluation.every=1", f"evaluation.template={use}"),
            "+evaluation.suites.plain={prompts: ['What is 1 plus 2?']}",
            "+evaluation.suites.raw={prompts: ['What is 1 plus 2?'], template: raw}",
            "data.max_prompt_tokens=64",
        ]
    )
    tokenizer = Tokenizer(place / "model")
    texts = {
        suite.name: open_evaluation_prompts(suite, config.data, tokenizer)[0].text
        for suite in parse_evaluation_suites(config)
        if suite.name is not None
    }
    assert ("<|im_start|>" in texts["plain"]) == is_rendered
    assert texts["raw"] == "What is 1 plus 2?"


def test_run_is_found_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    step = run / "checkpoints" / "step_1"
    step.mkdir(parents=True)
    save_config(compose_config(["experiment=tiny_ppo", f"run.dir={run}"]), run / "config.yaml")
    monkeypatch.chdir(step.parent)
    for source in (run, step, Path("step_1")):
        config = _find_run(source)
        assert config is not None and config.run.dir == str(run)
    assert _find_run(tmp_path / "model") is None


def test_template_options_change_the_prompt(place: Path) -> None:
    prompts = []
    for file, options in (
        ("plain.jsonl", ("--chat",)),
        ("plain.jsonl", ("--raw",)),
        ("chats.jsonl", ("--raw", "--fields", "{messages: conversation}")),
    ):
        arguments = ("--prompts", file, "--limit", "1", "--max-new-tokens", "1", "--overwrite")
        output = ("--output", "one.jsonl")
        done = aligner(place, "generate", "model", *arguments, *options, *output)
        assert done.returncode == 0, done.stderr
        assert NOTE not in done.stderr
        prompts += [record["prompt"] for record in read_records(place / "one.jsonl")]
    assert prompts == [RENDERED, "What is 1 plus 2?", "What is 1 plus 2?"]


def test_conversation_without_template_is_refused() -> None:
    turns = [{"role": role, "content": "hello"} for role in ("system", "user")]
    with pytest.raises(BadRecord, match="messages of these roles: system, user"):
        unwrap_message(Record({"messages": turns}, "chats.jsonl:1"))


def test_wrapping_a_text_keeps_its_other_fields() -> None:
    record = Record({"prompt": "hello", "answer": "3"}, "plain.jsonl:1")
    wrapped = wrap_in_message(record)
    assert wrapped.values == {"prompt": [{"role": "user", "content": "hello"}], "answer": "3"}
    assert unwrap_message(wrapped) == record


@pytest.mark.parametrize("fields", ["prompt", "{prompt: [1]}", "{"])
def test_invalid_fields_are_refused(fields: str) -> None:
    with pytest.raises(ConfigError, match=r"--fields .*: must map aligner's field names"):
        _parse_fields(fields)
