"""Agents of real frameworks, each in its own environment: tools run, results are typed, and the
policy is trained on exactly the tokens that the engine generated.

`make test-frameworks` runs these tests; `docs/frameworks.md` lists the frameworks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.cases import CASES, Case
from tests.frameworks.framework_episode import is_installed, run_case

MAX_MISSING = 2

pytestmark = pytest.mark.timeout(600)


def test_at_most_two_environments_are_missing() -> None:
    environments = {case.environment for case in CASES}
    missing = sorted(name for name in environments if not is_installed(name))
    assert len(missing) <= MAX_MISSING, missing


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_episode_trains_on_the_generated_tokens(case: Case, tmp_path: Path) -> None:
    if not is_installed(case.environment):
        pytest.skip(f"not installed: python -m benchmarks.peer_environment {case.environment}")
    outcome = run_case(case, tmp_path)

    assert outcome.report == {
        "calls": [[6, 7]] * case.calls,
        "result": case.result,
        "type": case.result_type,
    }
    generated = [completion.tokens.tolist() for completion in outcome.completions]
    assert len(generated) == len(case.turns)
    # each turn is trained once; branches are in no particular order
    assert sorted(outcome.generated_turns) == sorted(generated)
    assert len(outcome.sample.branches) == case.branches
    assert outcome.sample.rewards is not None
    assert float(outcome.sample.rewards.sum()) == 1.0
    assert outcome.sample.finish_reason == "stop"
