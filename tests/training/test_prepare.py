from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.training.prepare import prepare_run

JUDGE = (
    *("experiment=tiny_ppo", "reward=judge", "reward.judge_url=http://127.0.0.1:9/v1", "reward.judge_model=tester"),
    "reward.judge_template='{response} {rubric}'",
)


def test_a_record_without_a_field_of_the_judges_question_is_refused_beforehand(tmp_path: Path) -> None:
    records = [{"prompt": "abc", "rubric": "Be kind."}, {"prompt": "xyz", "answer": "4"}]
    data, held_out = tmp_path / "data.jsonl", tmp_path / "held_out.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    told = r"reward\.judge_template: it has \{rubric\}, and the record of prompt 'xyz' has no such field, but answer"
    with pytest.raises(ConfigError, match=told):
        prepare_run(compose_config([*JUDGE, f"run.dir={tmp_path / 'run'}", f"data.path={data}"]))
    data.write_text(json.dumps(records[0]) + "\n")
    held_out.write_text(json.dumps(records[1]) + "\n")
    given = [*JUDGE, f"run.dir={tmp_path / 'run'}", f"data.path={data}"]
    evaluated = [*given, "evaluation.every=1", f"evaluation.path={held_out}"]
    with pytest.raises(ConfigError, match=told):
        prepare_run(compose_config(evaluated))
    prepare_run(compose_config([*evaluated, "evaluation.function=digit_fraction"]))
    prepare_run(compose_config(given))
