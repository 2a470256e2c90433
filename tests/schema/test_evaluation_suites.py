"""Evaluation suites: inherited keys, names, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.schema import Config, DataConfig, EvaluationConfig
from aligner.schema.environment import EnvironmentConfig, PythonToolConfig
from aligner.schema.evaluation_suites import parse_evaluation_suites
from aligner.schema.keys import with_unread_defaults

MATH = {"path": "math.jsonl", "function": "math", "samples": 8}


def suites(**evaluation: Any) -> dict[str | None, EvaluationConfig]:
    return {
        suite.name: suite.settings
        for suite in parse_evaluation_suites(Config(evaluation=EvaluationConfig(**evaluation)))
    }


def test_evaluation_section_is_the_default_suite() -> None:
    assert suites(prompts=["a"]) == {None: EvaluationConfig(prompts=["a"])}
    assert list(suites()) == [None]


def test_suite_inherits_keys_of_the_section() -> None:
    given: dict[str, Any] = {
        "every": 3,
        "prompts": ["a"],
        "group_by": "task",
        "judge": {"judge_model": "m"},
        "temperature": 0.5,
    }
    both = suites(**given, count=4, suites={"math": MATH})
    assert list(both) == [None, "math"]
    assert both["math"] == EvaluationConfig(
        every=3, temperature=0.5, count=4, path="math.jsonl", function="math", samples=8
    )
    assert replace(both[None], suites={}) == EvaluationConfig(**given, count=4)


def test_section_keys_may_serve_only_suites() -> None:
    suites_of = "+evaluation.suites.math={prompts: [a], samples: 8, function: math}"
    given = (
        "evaluation.every=5",
        "evaluation.temperature=0.7",
        "evaluation.function_timeout_s=9",
        suites_of,
    )
    config = with_unread_defaults(compose_config(["experiment=tiny_ppo", *given]))
    (math,) = parse_evaluation_suites(config)
    assert (math.settings.temperature, math.settings.function_timeout_s) == (0.7, 9)
    with pytest.raises(ConfigError, match=r"evaluation\.temperature=0\.7: has no effect with"):
        compose_config(["experiment=tiny_ppo", *given[:3], "evaluation.prompts=[a]"])


def test_section_without_prompts_is_not_evaluated() -> None:
    assert list(suites(samples=2, suites={"b": {"prompts": ["a"]}, "a": {"prompts": ["b"]}})) == [
        "b",
        "a",
    ]
    questions = {"evaluation": EvaluationConfig(questions=3, suites={"math": MATH})}
    # evaluation.questions has no effect without data.tasks
    assert [suite.name for suite in parse_evaluation_suites(Config(**questions))] == ["math"]
    with_tasks = Config(data=DataConfig(tasks=["gcd"]), **questions)
    assert [suite.name for suite in parse_evaluation_suites(with_tasks)] == [None, "math"]


def test_suite_has_own_prefix_and_sample_ids() -> None:
    config = Config(evaluation=EvaluationConfig(prompts=["a"], suites={"math": MATH}))
    unnamed, math = parse_evaluation_suites(config)
    assert (unnamed.key, unnamed.prefix) == ("evaluation", "eval/")
    assert (math.key, math.prefix) == ("evaluation.suites.math", "eval/math/")
    assert 2**40 == unnamed.first_prompt_id < math.first_prompt_id < 2**62


@pytest.mark.parametrize(
    ("name", "entries", "problem"),
    [
        (
            "a/b",
            MATH,
            "evaluation.suites.a/b: the name of a suite is part of metric names; it must consist of"
            " letters, digits, _ and -, and must not be score",
        ),
        (
            "score",
            MATH,
            "evaluation.suites.score: the name of a suite is part of metric names; it must ",
        ),
        (
            "math",
            ["a"],
            r"evaluation.suites.math=\['a'\]: expected a mapping with path or prompts, got list",
        ),
        (
            "math",
            {"every": 3},
            "evaluation.suites.math.every: applies to all suites; set evaluation.every",
        ),
        ("math", {"suites": {}}, "evaluation.suites.math.suites: applies to all suites"),
        (
            "math",
            {"sample": 3},
            "math.sample: unknown key; did you mean evaluation.suites.math.samples?",
        ),
        ("math", {"samples": 0}, "evaluation.suites.math.samples=0: must be at least 1"),
        ("math", {"samples": 1.5}, "evaluation.suites.math.samples=1.5: must be an integer"),
        ("math", {"greedy": 1}, "evaluation.suites.math.greedy=1: must be true or false"),
        ("math", {"prompts": "a"}, "evaluation.suites.math.prompts=a: must be a list of strings"),
        ("math", {"fields": "a"}, "evaluation.suites.math.fields=a: expected a mapping, got str"),
        ("math", {"path": 3}, "evaluation.suites.math.path=3: expected a string, got int"),
        (
            "math",
            {"temperature": "hot"},
            "evaluation.suites.math.temperature=hot: must be a finite number",
        ),
        (
            "math",
            {"pass_threshold": None},
            "evaluation.suites.math.pass_threshold=None: must be a finite number",
        ),
    ],
)
def test_invalid_suite_is_refused_with_its_key(name: str, entries: Any, problem: str) -> None:
    config = Config(evaluation=EvaluationConfig(every=1, suites={name: entries}))
    with pytest.raises(ConfigError, match=problem):
        check(config)
    with pytest.raises(ConfigError, match=problem):
        parse_evaluation_suites(config)


CALCULATOR = {"target": "calc:Calculator", "max_turns": 3, "turn_end": "]"}


def environments(**given: Any) -> dict[str | None, EnvironmentConfig]:
    """Return the environments of suites of a run with the environment CALCULATOR."""
    entries = {name: {"prompts": ["a"], "environment": value} for name, value in given.items()}
    config = Config(
        environment=EnvironmentConfig(**CALCULATOR),
        evaluation=EvaluationConfig(every=1, suites={"same": {"prompts": ["a"]}, **entries}),
    )
    return {suite.name: suite.environment for suite in parse_evaluation_suites(config)}


def test_suite_environment_overrides_keys_of_the_section() -> None:
    found = environments(
        short={"max_turns": 1, "python": {"cpu_s": 2}},
        plain={"target": None},
        agent={"target": None, "agent": "agent:run"},
    )
    assert found["same"] == EnvironmentConfig(**CALCULATOR)
    assert found["short"] == EnvironmentConfig(
        **CALCULATOR | {"max_turns": 1, "python": PythonToolConfig(cpu_s=2)}
    )
    assert not found["plain"].has_episodes
    assert (found["agent"].agent, found["agent"].max_turns) == ("agent:run", 3)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"max_turns": 0}, "max_turns=0: must be at least 1"),
        ({"workers": "x"}, "workers=x: expected int, got str"),
        ({"max_turnss": 1}, "max_turnss: unknown key; did you mean KEY.max_turns?"),
        ({"sandbox": "none"}, "sandbox=none: allowed: required, best_effort"),
        ({"agent": "agent:run"}, "target and KEY.agent: only one of these keys can be set"),
        ({"target": "calc"}, "target=calc: must be tools, module:Class, or null"),
        ({"target": "tools"}, "target=tools: no tools are set; set KEY.tools or KEY.mcp"),
    ],
)
def test_problem_of_suite_environment_names_its_key(
    environment: dict[str, Any], message: str
) -> None:
    overrides = (
        "experiment=tiny_ppo",
        "environment.target=calc:Calculator",
        "environment.turn_end=.",
        "environment.deadline_s=20",
        "evaluation.every=1",
    )
    config = compose_config(list(overrides))
    config.evaluation.suites = {"one": {"prompts": ["a"], "environment": environment}}
    key = "evaluation.suites.one.environment"
    with pytest.raises(ConfigError) as raised:
        check(config)
    assert f"{key}.{message.replace('KEY', key)}" in str(raised.value)
    # the section itself has no problem
    assert not [line for line in str(raised.value).splitlines() if line.startswith("environment")]


def test_suite_environment_must_be_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"suites\.one\.environment=3: expected a mapping"):
        environments(one=3)


def test_suite_without_environment_needs_a_function() -> None:
    suite = "+evaluation.suites.one={prompts: [a], environment: {target: null}}"
    overrides = ("experiment=calculator", "model.source=random", "evaluation.every=1", suite)
    with pytest.raises(ConfigError, match=r"suites\.one\.function=null: the run's reward is that"):
        check(compose_config([*overrides]))
    check(compose_config([*overrides, "+evaluation.suites.one.function=exact_match"]))


def test_prompts_of_a_suite_are_known_by_their_ids() -> None:
    given = {"math": MATH, "chat": {"prompts": ["a"]}}
    config = Config(evaluation=EvaluationConfig(prompts=["a"], suites=given))
    suites = parse_evaluation_suites(config)
    for suite in suites:
        for prompt_id in (suite.first_prompt_id, suite.first_prompt_id + 999):
            assert [each for each in suites if each.has_prompt(prompt_id)] == [suite]
    assert not any(suite.has_prompt(999) for suite in suites)
