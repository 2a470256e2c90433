"""Test of a complete run with tasks of reasoning_gym."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.runs import run_to_end

TASKS = ("calendar_arithmetic", "letter_counting", "spell_backward")
OVERRIDES = (
    "model.source=random",
    # The experiment's 24,000 questions would take longer to create than two steps.
    (
        "data.tasks=[{name: calendar_arithmetic, questions: 60, config: {tasks: [is_leap_year]}},"
        "{name: spell_backward, questions: 60, config: {max_word_len: 4}},"
        "{name: letter_counting, questions: 60, config: {min_words: 1, max_words: 2}}]"
    ),
    "evaluation.every=2",
    "evaluation.questions=6",
    "evaluation.samples=2",
    "rollout.prompts_per_step=6",
    "rollout.samples_per_prompt=2",
    "rollout.max_response_tokens=4",
    "actor.optimizer.warmup_steps=0",
    "logging.tensorboard=false",
)


@pytest.mark.promise("reasoning-tasks-report-each-task")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pass_rates_are_reported_for_each_task(tmp_path: Path) -> None:
    """tests/data/test_reasoning_tasks.py checks that questions are equal in every process."""
    run = run_to_end(tmp_path / "run", *OVERRIDES, "run.steps=2", experiment="reasoning_gym")
    assert run.code == 0, run.report()
    last = run.metrics[-1]
    passes = [last[f"eval/pass@1/{task}"] for task in TASKS]
    assert last["eval/pass@1"] == pytest.approx(sum(passes) / 3)
    assert all(
        last[f"eval/pass@1/{task}_low"] <= rate <= last[f"eval/pass@1/{task}_high"]
        for task, rate in zip(TASKS, passes, strict=True)
    )
    assert last["eval/score"] == pytest.approx(
        sum(last[f"eval/score/{task}"] for task in TASKS) / 3
    )
