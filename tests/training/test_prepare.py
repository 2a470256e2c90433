"""Test the checks of records before a run starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from aligner.config.compose import compose_config
from aligner.data.example_cache import ExampleCache
from aligner.errors import ConfigError
from aligner.paths import RunPaths
from aligner.training.prepare import open_run_prompts, prepare_run
from tests.data.chat_models import chat_model

JUDGE = (
    *(
        "experiment=tiny_ppo",
        "reward=judge",
        "reward.judge_url=http://127.0.0.1:9/v1",
        "reward.judge_model=tester",
    ),
    "reward.judge_template='{response} {rubric}'",
)


def test_record_without_template_field_is_refused(
    tmp_path: Path,
) -> None:
    records = [{"prompt": "abc", "rubric": "Be kind."}, {"prompt": "xyz", "answer": "4"}]
    data, held_out = tmp_path / "data.jsonl", tmp_path / "held_out.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    message = (
        r"reward\.judge_template: contains \{rubric\}, but the record of prompt 'xyz' \(.*jsonl:\d\) has no such"
        r" field; fields of the record: answer\."
    )
    with pytest.raises(ConfigError, match=message):
        prepare_run(compose_config([*JUDGE, f"run.dir={tmp_path / 'run'}", f"data.path={data}"]))
    data.write_text(json.dumps(records[0]) + "\n")
    held_out.write_text(json.dumps(records[1]) + "\n")
    given = [*JUDGE, f"run.dir={tmp_path / 'run'}", f"data.path={data}"]
    evaluated = [*given, "evaluation.every=1", f"evaluation.path={held_out}"]
    with pytest.raises(ConfigError, match=message):
        prepare_run(compose_config(evaluated))
    prepare_run(compose_config([*evaluated, "evaluation.function=digit_fraction"]))
    judge = (
        "{judge_url: http://a/v1, judge_model: b, judge_template:"
        " '{rubric}|{response_a}|{response_b}'}"
    )
    with pytest.raises(ConfigError, match=message.replace("reward", r"evaluation\.judge")):
        prepare_run(
            compose_config(
                [*evaluated, "evaluation.function=digit_fraction", f"+evaluation.judge={judge}"]
            )
        )
    prepare_run(compose_config(given))


def test_changed_evaluation_records_are_checked_again(tmp_path: Path) -> None:
    data, held_out = tmp_path / "data.jsonl", tmp_path / "held_out.jsonl"
    for file in (data, held_out):
        file.write_text(json.dumps({"prompt": "abc", "rubric": "Be kind."}) + "\n")
    evaluation = ["evaluation.every=1", f"evaluation.path={held_out}"]
    config = compose_config(
        [*JUDGE, f"run.dir={tmp_path / 'run'}", f"data.path={data}", *evaluation]
    )
    prepare_run(config)
    held_out.write_text(json.dumps({"prompt": "xyz"}) + "\n")
    with pytest.raises(ConfigError, match=r"the record of prompt 'xyz' .* has no such field"):
        prepare_run(config)


def test_unscored_or_unknown_task_is_refused(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data.jsonl"
    records = [
        {"prompt": "abc", "task": "chat"},
        {"prompt": "2+2=", "task": "sums", "answer": "4"},
        {"prompt": "xyz"},
    ]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))

    def prepare(*sources: str) -> None:
        given = [f"+reward.sources.{name}" for name in sources]
        run = (
            "experiment=tiny_ppo",
            "reward.kind=combined",
            f"run.dir={tmp_path / 'run'}",
            f"data.path={data}",
        )
        prepare_run(compose_config([*run, *given]))

    sums = "a={kind: function, function: exact_match, weight: 0, task_weights: {sums: 2}}"
    prepare(sums, "b={kind: function, function: digit_fraction}")
    with pytest.raises(
        ConfigError,
        match=r"the record of prompt 'xyz' .* has task=None, but every source has weight 0 for this task",
    ):
        prepare(
            sums, "b={kind: function, function: digit_fraction, weight: 0, task_weights: {chat: 1}}"
        )
    with pytest.raises(
        ConfigError,
        match=r"sources\.b\.task_weights\.sumz: no record has this task; tasks of the records:"
        r" None, chat, sums",
    ):
        prepare(sums, "b={kind: function, function: digit_fraction, task_weights: {sumz: 0}}")


def test_record_without_kept_field_is_refused(tmp_path: Path) -> None:
    more = (
        "algorithm=preferences",
        "rollout.samples_per_prompt=2",
        "algorithm.kept_fields=[answer, question]",
    )
    config = compose_config(
        [
            "experiment=tiny_ppo",
            f"run.dir={tmp_path / 'run'}",
            f"data.path={tmp_path / 'p.jsonl'}",
            *more,
        ]
    )
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "a", "answer": "1", "question": "x"}\n{"prompt": "b", "answer": "2"}\n'
    )
    with pytest.raises(
        ConfigError,
        match=r"kept_fields: the record of prompt 'b' .* has no field `question`; fields of the record: answer",
    ):
        prepare_run(config)
    prepare_run(replace(config, algorithm=replace(config.algorithm, kept_fields=["answer"])))


def test_unparsable_answers_are_reported_with_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, held_out = tmp_path / "data.jsonl", tmp_path / "held_out.jsonl"
    run = ["experiment=tiny_ppo", f"run.dir={tmp_path / 'run'}", f"data.path={data}"]

    def write(path: Path, *answers: str) -> None:
        records = [{"prompt": "2+2=", "answer": answer} for answer in answers]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    write(data, "4", "four")
    with pytest.raises(ConfigError, match=r"(?s)1 of 2 records .*data\.jsonl:2: .*'four'"):
        prepare_run(compose_config([*run, "reward.function=gsm8k"]))

    write(data, "4", "x = = 2 +")
    prepare_run(compose_config([*run, "reward.function=math"]))
    printed = capsys.readouterr().err
    assert "the answers of 1 of 2 records cannot be parsed" in printed
    assert "data.jsonl:2: field `answer` is 'x = = 2 +'" in printed

    write(held_out, "\\frac{1}{")
    evaluated = [*run, "evaluation.every=1", f"evaluation.path={held_out}"]
    with pytest.raises(ConfigError, match=r"(?s)evaluation\.function=math: .*held_out\.jsonl:1: "):
        prepare_run(compose_config([*evaluated, "evaluation.function=math"]))


@pytest.mark.parametrize(("samples_mib", "has_messages"), [(100, True), (0, False)])
def test_prompts_have_messages_if_samples_are_stored(
    tmp_path: Path, samples_mib: int, has_messages: bool
) -> None:
    messages = [{"role": "user", "content": "Why?"}]
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"messages": messages, "answer": "4"}) + "\n")
    config = compose_config(
        ["experiment=tiny_ppo", f"data.path={data}", f"logging.samples_mib={samples_mib}"]
    )
    cache = ExampleCache(tmp_path / "cache", RunPaths(tmp_path / "run"), is_prepared=False)
    prompts = open_run_prompts(config, chat_model("bytes", "chatml"), None, cache)
    (prompt,) = prompts.take(0, 1)
    stored = {"messages": messages} if has_messages else {}
    assert prompt.metadata == {"answer": "4", **stored}
