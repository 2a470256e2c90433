"""Test evaluation during training, on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aligner.data.model_directory import read_shape
from aligner.data.prompts import open_evaluation_prompts
from aligner.data.tokenizer import Tokenizer, build_character_tokenizer
from aligner.errors import ConfigError
from aligner.schema import Config, DataConfig, EvaluationConfig
from aligner.schema.evaluation_suites import Suite, parse_evaluation_suites
from tests.megatron.reference import save_llama
from tests.rewards.judge_server import Reply, judging, says
from tests.training import evaluation_jobs
from tests.worker_pool import WorkerPool

PROMPTS = ["abc", "hello", "1+1="]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_llama(tmp_path_factory.mktemp("llama"), tied=True)
    build_character_tokenizer(read_shape(directory)).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def found(
    pool: WorkerPool, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The results of two ranks, which are equal on both, and of one rank."""
    run = tmp_path_factory.mktemp("evaluated")
    first, second = pool.run(
        evaluation_jobs.evaluations, 2, str(llama), str(run / "two"), 2, prompts=PROMPTS
    )
    assert first == second
    (alone,) = pool.run(
        evaluation_jobs.evaluations, 1, str(llama), str(run / "one"), 1, prompts=PROMPTS
    )
    return {"two": first, "one": alone, "run": run}


def test_evaluation_is_due_first_periodically_and_last(
    found: dict[str, Any],
) -> None:
    assert found["one"]["due"] == [0, 2, 4, 5]


@torch.no_grad()
def test_greedy_evaluation_equals_transformers(found: dict[str, Any], llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    network, tokenizer = (
        AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval(),
        Tokenizer(llama),
    )
    logprobs, digits = [], []
    for text, response in zip(PROMPTS, found["one"]["responses"], strict=True):
        prompt = tokenizer.encode(text)
        whole = torch.cat([prompt, torch.tensor(response)])
        scores = network(whole[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert scores.argmax(-1).tolist() == response
        logprobs += scores.amax(-1).tolist()  # at temperature 1, although the run samples at 0.7
        response_text = tokenizer.decode(response)
        digits.append(
            sum(character.isdigit() for character in response_text) / max(len(response_text), 1)
        )
    metrics = found["one"]["step 0"]
    assert metrics["eval/reference_perplexity"] == pytest.approx(
        torch.tensor(logprobs).mean().neg().exp().item(), rel=1e-4
    )
    assert metrics["eval/score"] == pytest.approx(sum(digits) / 3)
    assert metrics["eval/length"] == evaluation_jobs.RESPONSE_TOKENS


def test_initial_policy_ties_with_itself(
    found: dict[str, Any],
) -> None:
    metrics = found["one"]["step 0"]
    assert metrics["eval/win_rate"] == 0.5
    assert found["one"]["resumed"] == metrics
    records = [
        json.loads(line)
        for line in (found["run"] / "one" / "references.jsonl").read_text().splitlines()
    ]
    assert [record["prompt"] for record in records] == PROMPTS
    assert sum(record["score"] for record in records) / 3 == pytest.approx(metrics["eval/score"])


def test_asynchronous_evaluation_equals_synchronous(found: dict[str, Any]) -> None:
    for ranks in ("one", "two"):
        assert found[ranks]["beside"] == found[ranks]["resumed"]


def test_evaluations_use_the_same_random_numbers(found: dict[str, Any]) -> None:
    first, second = found["one"]["drawn"]
    assert first == second
    assert first["eval/reference_perplexity"] != found["one"]["step 0"]["eval/reference_perplexity"]
    assert "eval/pass@2" in first and "eval/pass@4" not in first


@torch.no_grad()
def test_reference_kl_uses_temperature_1_for_reference(found: dict[str, Any], llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    network, tokenizer = (
        AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval(),
        Tokenizer(llama),
    )
    differences = []
    for place, response in enumerate(found["one"]["sharp responses"]):
        prompt, drawn = tokenizer.encode(PROMPTS[place // 3]), torch.tensor(response)
        logits = network(torch.cat([prompt, drawn])[None]).logits[0, len(prompt) - 1 : -1].double()
        moved = (logits / 0.5).log_softmax(-1) - logits.log_softmax(-1)
        differences.append(moved.gather(1, drawn[:, None]).sum().item())
    assert found["one"]["sharp"]["eval/reference_kl"] == pytest.approx(
        sum(differences) / 9, rel=1e-4
    )
    assert found["one"]["drawn"][0]["eval/reference_kl"] == pytest.approx(0, abs=1e-4)
    assert "eval/reference_kl" not in found["one"]["step 0"]  # greedy tokens are no samples


@pytest.mark.parametrize("name", ["step 0", "resumed", "responses"])
def test_two_replicas_equal_one_replica(found: dict[str, Any], name: str) -> None:
    if name == "responses":
        assert found["two"][name] == found["one"][name]
    else:
        assert found["two"][name] == pytest.approx(found["one"][name], rel=1e-5)


def test_missing_or_wrong_references_are_refused(
    found: dict[str, Any],
) -> None:
    for ranks in ("one", "two"):
        assert (
            "references.jsonl: no such file, so there are no references to compare responses with"
            in found[ranks]["lost"]
        )
        assert (
            "references.jsonl: contains references of other prompts"
            in found[ranks]["other prompts"]
        )
        assert (
            "references.jsonl: contains scores of evaluation.function="
            in found[ranks]["other scorer"]
        )


def test_judge_is_asked_once_per_pair_of_responses(
    pool: WorkerPool, llama: Path, tmp_path: Path
) -> None:
    """The judge prefers the alphabetically first text, and returns no verdict for one prompt."""

    def alphabetic(question: str, _: int) -> Reply:
        prompt, first, second = question.split("|")
        return says("Hm." if prompt == "hello" else f"VERDICT: {'A' if first < second else 'B'}")

    with judging(alphabetic) as server:
        judge = {"judge_url": server.url, "judge_model": "tester", "judge_tries": 1}
        judge["judge_template"] = "{prompt}|{response_a}|{response_b}"
        drawn = {"prompts": PROMPTS, "samples": 3, "judge": judge}
        first, second = pool.run(
            evaluation_jobs.evaluate_with_judge, 2, str(llama), str(tmp_path / "run"), 2, **drawn
        )
        assert first == second and first[0] == first[1] == first[2]
        assert len(set(server.questions)) == len(server.questions)
    references = {
        record["prompt"]: record["response"]
        for record in map(
            json.loads, (tmp_path / "run" / "references.jsonl").read_text().splitlines()
        )
    }
    asked = {tuple(question.split("|")) for question in server.questions}
    wins = {
        prompt: [a < b for name, a, b in asked if name == prompt and b == references[prompt]]
        for prompt in PROMPTS
    }
    assert all(len(each) == 3 for each in wins.values())  # all differ from the reference
    assert first[0]["eval/judge_win_rate"] == pytest.approx(
        (sum(wins["abc"]) + sum(wins["1+1="])) / 6
    )
    assert (
        first[0]["eval/judge_unreadable"],
        first[0]["eval/judge_order_bias"],
        first[0]["eval/judge_ties"],
    ) == (3, 0, 0)


@pytest.fixture(scope="module")
def measured(
    pool: WorkerPool, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Metrics by name: all suites on two ranks; the unnamed suite and `drawn` alone on one rank."""
    run = tmp_path_factory.mktemp("suites")
    drawn = {
        "prompts": ["x+y", "hello"],
        "samples": 3,
        "function": "tests.training.evaluation_jobs:letters",
    }
    given = {
        "all": {"prompts": PROMPTS, "suites": {"easy": {"prompts": PROMPTS[:2]}, "drawn": drawn}},
        "unnamed": {"prompts": PROMPTS},
        "drawn": {"suites": {"drawn": drawn}, "samples": 1},
    }
    each: dict[str, Any] = {"run": run}
    for name, ranks in {"all": 2, "unnamed": 1, "drawn": 1}.items():
        every = pool.run(
            evaluation_jobs.suites, ranks, str(llama), str(run / name), ranks, **given[name]
        )
        assert all(one == every[0] for one in every)
        each[name] = every[0]
    return each


def test_suite_metrics_do_not_depend_on_other_suites(measured: dict[str, Any]) -> None:
    both, unnamed, drawn = (measured[name][0] for name in ("all", "unnamed", "drawn"))
    assert {name: value for name, value in both.items() if name.count("/") == 1} == pytest.approx(
        unnamed, rel=1e-5
    )
    assert {
        name: value for name, value in both.items() if name.startswith("eval/drawn/")
    } == pytest.approx(drawn, abs=1e-5)
    assert all(name.startswith("eval/drawn/") for name in drawn)
    assert {
        "eval/drawn/pass@2",
        "eval/drawn/reference_kl",
        "eval/easy/win_rate",
        "eval/easy/score_low",
    } <= set(both)
    assert "eval/easy/pass@2" not in both and both["eval/easy/score"] != both["eval/score"]


def test_resumed_and_asynchronous_suites_have_equal_metrics(
    measured: dict[str, Any],
) -> None:
    for name in ("all", "drawn"):
        at_first, resumed, beside = measured[name]
        assert at_first == resumed == beside
    files = sorted(path.name for path in (measured["run"] / "all").glob("references*"))
    assert files == ["references-drawn.jsonl", "references-easy.jsonl", "references.jsonl"]


def test_prompt_ids_do_not_depend_on_other_suites(llama: Path) -> None:
    config = Config(
        evaluation=EvaluationConfig(
            prompts=["a"], suites={name: {"prompts": ["a", "b"]} for name in ("x", "y")}
        )
    )
    unnamed, first, second = (
        [prompt.id for prompt in open_evaluation_prompts(suite, DataConfig(), Tokenizer(llama))]
        for suite in parse_evaluation_suites(config)
    )
    assert (
        len({*unnamed, *first, *second}) == 5
        and min(*unnamed, *first, *second) == unnamed[0] == 2**40
    )
    config.evaluation.suites = {"y": {"prompts": ["c"]}}
    config.evaluation.prompts = []
    (alone,) = parse_evaluation_suites(config)
    assert open_evaluation_prompts(alone, DataConfig(), Tokenizer(llama))[0].id == second[0]


def test_evaluation_prompt_ids_differ_from_training(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "held_out.jsonl"
    file.write_text(
        '{"question": "a", "answer": 2}\n{"question": "b", "reference": "c"}\n{"question": "d"}\n'
    )
    settings = EvaluationConfig(path=str(file), fields={"prompt": "question"}, count=2)
    prompts = open_evaluation_prompts(
        Suite(None, settings), DataConfig(max_prompt_tokens=4), Tokenizer(llama)
    )
    assert [(prompt.text, prompt.metadata) for prompt in prompts] == [
        ("a", {"answer": 2}),
        ("b", {"reference": "c"}),
    ]
    assert [prompt.id for prompt in prompts] == [2**40, 2**40 + 1]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ('{"prompt": "a", "reference": 3}', "field `reference` must be a string, got int"),
        ('{"prompt": "abcdef"}', "has 6 tokens, allowed: 1 to data.max_prompt_tokens=4"),
    ],
)
def test_invalid_held_out_record_is_refused(
    llama: Path, tmp_path: Path, record: str, problem: str
) -> None:
    file = tmp_path / "held_out.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{record}\n')
    with pytest.raises(ConfigError, match=f"{file}:2: .*{problem}"):
        open_evaluation_prompts(
            Suite(None, EvaluationConfig(path=str(file))),
            DataConfig(max_prompt_tokens=4),
            Tokenizer(llama),
        )
