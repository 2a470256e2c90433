"""Tasks of reasoning_gym as prompts and demonstrations, and the scores of their verifiers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from aligner.checks import data as data_checks
from aligner.checks import evaluation as evaluation_checks
from aligner.config.compose import compose_config
from aligner.data.examples import open_demonstrations
from aligner.data.model_directory import prepare_model
from aligner.data.prompts import open_evaluation_prompts, open_prompts
from aligner.data.records import read_source
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.scorers import ScoringError, call_scorer, resolve_scorer
from aligner.schema import AlgorithmConfig, Config, DataConfig, EvaluationConfig
from aligner.schema.data_sources import parse_data_sources
from aligner.schema.evaluation_suites import Suite

IMPURE = (
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
"""Tasks whose questions in the library depend on the global random state or on string hashes."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    run = tmp_path_factory.mktemp("run")
    return Tokenizer(
        prepare_model(compose_config(["experiment=reasoning_gym_sft", f"run.dir={run}"]))
    )


def data_of(*tasks: Any, **settings: Any) -> DataConfig:
    return DataConfig(tasks=list(tasks), **{"shuffle": False, "max_prompt_tokens": 300, **settings})


def records(*tasks: str) -> dict[str, list[dict[str, Any]]]:
    """Return three records of each task."""
    given = data_of(*({"name": task, "questions": 3} for task in tasks))
    return {
        task: read_source(source, lambda record: dict(record.values))[0]
        for task, source in zip(tasks, parse_data_sources(given), strict=True)
    }


def problems(data: DataConfig, **evaluation: Any) -> str:
    config = Config(
        data=data,
        algorithm=AlgorithmConfig(trainer="online"),
        evaluation=EvaluationConfig(**evaluation),
    )
    return "\n".join(
        [
            *data_checks.find_problems(config, None, {}),
            *evaluation_checks.find_problems(config, None, {}),
        ]
    )


def scores(*pairs: tuple[str, Any]) -> list[float]:
    requests = [ScoringRequest("", response, prompt.metadata) for response, prompt in pairs]
    return call_scorer("reasoning_gym", resolve_scorer("reasoning_gym"), requests)


def test_tasks_are_mixed_by_weight_and_scored(tokenizer: Tokenizer) -> None:
    data = data_of(
        "chain_sum",
        {"name": "spell_backward", "weight": 2, "questions": 50},
        task_prompt="Q: {question}\nA: ",
    )
    prompts = open_prompts(data, tokenizer, 1).take(0, 30)
    assert Counter(prompt.metadata["task"] for prompt in prompts) == {
        "spell_backward": 20,
        "chain_sum": 10,
    }
    assert all(
        prompt.text.startswith("Q: ") and prompt.text.endswith("\nA: ") for prompt in prompts
    )
    sums = [prompt for prompt in prompts if prompt.metadata["task"] == "chain_sum"]
    answers = [prompt.metadata["answer"] for prompt in sums]
    assert scores(*zip(answers, sums, strict=True)) == [1.0] * 10
    tagged = [f"<answer>0.5</answer> or rather <answer> {answer}\n</answer>." for answer in answers]
    assert scores(*zip(tagged, sums, strict=True)) == [1.0] * 10
    assert scores(("", sums[0]), ("no idea", sums[0])) == [0.0, 0.0]


@pytest.mark.slow
def test_held_out_questions_are_never_trained_on(tokenizer: Tokenizer) -> None:
    task = {"name": "chain_sum", "config": {"max_terms": 2, "max_digits": 1}, "questions": 600}
    data = data_of(task, "gcd")
    held_out = open_evaluation_prompts(Suite(None, EvaluationConfig(questions=40)), data, tokenizer)
    assert [prompt.metadata["task"] for prompt in held_out] == ["chain_sum", "gcd"] * 40
    texts = {prompt.text for prompt in held_out if prompt.metadata["task"] == "chain_sum"}
    assert len(texts) > 5
    for seed in (0, 1):
        stream = open_prompts(data_of(task | {"seed": seed}), tokenizer, 1)
        learned = {prompt.text for prompt in stream.take(0, 600)}
        assert len(stream) == 600 and len(learned) > 100 and not learned & texts


@pytest.mark.promise("reasoning-tasks-report-each-task")
@pytest.mark.slow
def test_questions_do_not_depend_on_order_or_process() -> None:
    one, other = records(*IMPURE), records(*reversed(IMPURE))
    for task in IMPURE:
        texts = [record["prompt"] for record in one[task]]
        assert texts == [record["prompt"] for record in other[task]] and len(set(texts)) == 3
    requests = [
        ScoringRequest("", record["answer"], record) for task in IMPURE for record in one[task]
    ]
    assert call_scorer("reasoning_gym", resolve_scorer("reasoning_gym"), requests) == [1.0] * len(
        requests
    )


def test_unparsable_answer_scores_zero_and_is_reported() -> None:
    record = json.dumps(records("prime_factorization")["prime_factorization"][0])
    code = (
        "import json; from aligner.rewards.scorers import reasoning_scores as scores\n"
        "from aligner.rewards.scorers import ScoringRequest\n"
        f"print(scores([ScoringRequest('', 'two and two', json.loads({record!r}))]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[0.0]\n"
    assert "scored 0 for the answer 'two and two' to " in done.stderr
    assert ": ValueError: " in done.stderr


def test_changed_or_missing_question_raises(
    tokenizer: Tokenizer,
) -> None:
    (prompt,) = open_prompts(data_of("gcd"), tokenizer, 1).take(0, 1)
    question = prompt.metadata["question"]
    scorer = resolve_scorer("reasoning_gym")
    for metadata, message in (
        ({"question": question | {"checksum": 1}}, "generates a different question for .*gcd"),
        ({"answer": "4"}, "record lacks field `question`"),
    ):
        with pytest.raises(ScoringError, match=message):
            call_scorer("reasoning_gym", scorer, [ScoringRequest("", "1", metadata)])


def test_difficulty_rises_from_first_to_last_question(tokenizer: Tokenizer) -> None:
    task = {"name": "chain_sum", "difficulty": [0, 3], "questions": 100}
    levels = [
        json.loads(p.metadata["question"]["made_of"])[2]
        for p in open_prompts(data_of(task), tokenizer, 1).take(0, 100)
    ]
    assert levels == [level for level in range(4) for _ in range(25)]


def test_tasks_give_demonstrations_or_messages(tokenizer: Tokenizer) -> None:
    data = data_of({"name": "gcd", "questions": 20}, fields={"response": "answer"})
    assert len(open_demonstrations(data, tokenizer, 1)) == 20
    assert parse_data_sources(data)[0].arguments["messages"] is False
    asked = parse_data_sources(data_of("gcd", task_messages=True))[0].arguments
    assert asked["messages"] is True


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (
            ["chain_sums"],
            r"data\.tasks\[0\]=chain_sums: reasoning_gym has no such task; did you mean chain_sum",
        ),
        (["gcd", {"weight": 1}], r"data\.tasks\[1\]\.name: missing"),
        (
            [{"name": "gcd", "wieght": 1}],
            r"data\.tasks\[0\]\.wieght: unknown key; did you mean data\.tasks\[0\]\.weight\?",
        ),
        (
            [{"name": "gcd", "max_value": 9}],
            r"max_value: unknown key; .*put the task's settings in config",
        ),
        ([{"name": "gcd", "weight": 0}], r"weight=0: must be a finite number above 0"),
        ([{"name": "gcd", "questions": 0}], r"questions=0: must be an integer from 1 to"),
        ([{"name": "gcd", "seed": -1}], r"seed=-1: must be an integer from 0 to"),
        ([{"name": "gcd", "difficulty": [1]}], r"difficulty=\[1\]: must be a level"),
        (
            [{"name": "gcd", "config": {"max_valu": 9}}],
            r"config\.max_valu: gcd has no such setting; did you mean max_value\?",
        ),
        ([{"name": "acre", "difficulty": 1}], "acre has no difficulty levels"),
        ([3], r"data\.tasks\[0\]=3: expected the name of a task"),
    ],
)
def test_invalid_task_is_refused_by_checks(tasks: list[Any], message: str) -> None:
    assert re.search(message, problems(data_of(*tasks)))


def test_tasks_with_other_data_are_refused() -> None:
    assert "data.tasks: is not supported with data.path" in problems(data_of("gcd", path="p.jsonl"))
    assert "must contain {question}" in problems(data_of("gcd", task_prompt="answer!"))
    assert "evaluation.path or evaluation.prompts is also set" in problems(
        data_of("gcd"), questions=4, prompts=["a"]
    )
    assert problems(data_of("gcd"), questions=4, every=1) == ""


def test_setting_error_of_task_is_reported(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="min_value must be"):
        open_prompts(data_of({"name": "gcd", "config": {"min_value": -5}}), tokenizer, 1)
