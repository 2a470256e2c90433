"""Test `aligner evaluate`: its metrics against its samples and transformers, and its errors."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aligner import cli
from aligner.config.compose import compose_config, save_config
from aligner.data.model_directory import read_shape
from aligner.data.tokenizer import Tokenizer, build_character_tokenizer
from tests.agents.calling_model import saved
from tests.agents.test_generate import save_critic
from tests.megatron import families
from tests.rewards.judge_server import judging, says

PROMPTS: list[dict[str, Any]] = [
    {"prompt": "hello"},
    {"prompt": "a b", "reference": "12x"},
    {"prompt": "2+2="},
]
OPTIONS = ("--function", "digit_fraction", "--max-new-tokens", 6, "--no-stop-at-eos")
Evaluate = Callable[..., tuple[int, str, str]]


def save(family: str, directory: Path) -> Path:
    families.save(family, directory)
    build_character_tokenizer(read_shape(directory)).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokenizer."""
    return save("pythia", tmp_path_factory.mktemp("initial"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return file


@pytest.fixture
def aligner_evaluate(capsys: pytest.CaptureFixture[str]) -> Iterator[Evaluate]:
    """Function that runs the command in this process; returns exit code, stdout and stderr."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["evaluate", *map(str, arguments)])
        out, error = capsys.readouterr()
        return int(str(ended.value.code)), out, error

    yield run
    signal.signal(signal.SIGTERM, before)


def digits(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(len(text), 1)


@torch.no_grad()
def token_logprobs(directory: Path, prompt: str, response: list[int]) -> list[float]:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    asked = Tokenizer(directory).encode(prompt)
    scores = network(torch.cat([asked, torch.tensor(response)])[None]).logits[0].log_softmax(-1)
    return scores[len(asked) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def test_metrics_equal_those_of_stored_samples(
    model: Path, initial: Path, prompts: Path, tmp_path: Path, aligner_evaluate: Evaluate
) -> None:
    output = tmp_path / "samples.jsonl"
    arguments = (
        model,
        "--prompts",
        prompts,
        *OPTIONS,
        "--reference",
        initial,
        "--samples",
        2,
        "--json",
        "--output",
        output,
    )
    code, out, error = aligner_evaluate(*arguments, "--pass-threshold", 0.1)
    assert (code, error) == (0, "")
    metrics, records = (
        json.loads(out),
        [json.loads(line) for line in output.read_text().splitlines()],
    )
    assert (metrics["prompts"], metrics["samples"], len(records)) == (3, 2, 6)
    scores = [digits(record["response"]) for record in records]
    assert [record["score"] for record in records] == pytest.approx(scores)
    assert metrics["eval/score"] == pytest.approx(sum(scores) / 6)
    assert metrics["eval/pass@1"] == pytest.approx(sum(score >= 0.1 for score in scores) / 6)
    references = [record["reference_score"] for record in records]
    assert references[2:4] == pytest.approx([2 / 3] * 2)  # "12x"
    wins = [
        (score > other) + (score == other) / 2
        for score, other in zip(scores, references, strict=True)
    ]
    assert metrics["eval/win_rate"] == pytest.approx(sum(wins) / 6)
    logprobs = [
        logprob
        for record in records
        for logprob in token_logprobs(initial, record["prompt"], record["tokens"])
    ]
    expected = torch.tensor(logprobs).mean().neg().exp().item()
    assert metrics["eval/reference_perplexity"] == pytest.approx(expected, rel=1e-4)


def test_score_of_agent_is_its_reward_plus_function(
    tmp_path: Path, aligner_evaluate: Evaluate
) -> None:
    (tmp_path / "model").mkdir()
    model = saved(tmp_path / "model", "chatml")
    tasks, output = tmp_path / "tasks.jsonl", tmp_path / "out.jsonl"
    lines = [
        # the environment's own field `reference` is no text to compare with
        {"prompt": "task", "at": at, "asked": f"why {at}?", "reference": "none"}
        for at in range(2)
    ]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = (model, "--prompts", tasks, "--max-new-tokens", 20, "--json", "--output", output)
    agent = "environment.agent=tests.agents.openai_agents:looks"
    code, out, _ = aligner_evaluate(*arguments, agent, "--reference", model)
    metrics = json.loads(out)
    assert (code, metrics["eval/score"], metrics["eval/win_rate"]) == (0, 0.5, 0.5)
    assert metrics["eval/reference_perplexity"] > 0

    code, out, _ = aligner_evaluate(
        *arguments, agent, "--overwrite", "--function", "digit_fraction"
    )
    records = [json.loads(line) for line in output.read_text().splitlines()]
    by_prompt = {record["prompt_index"]: record["score"] for record in records}
    assert code == 0 and len(by_prompt) == 2
    assert json.loads(out)["eval/score"] == pytest.approx(sum(by_prompt.values()) / 2)
    assert all(score >= 0.5 for score in by_prompt.values())
    assert "eval/win_rate" not in json.loads(out)


def test_failed_agent_counts_as_lost_episode(tmp_path: Path, aligner_evaluate: Evaluate) -> None:
    (tmp_path / "model").mkdir()
    model = saved(tmp_path / "model", "chatml")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        "".join(
            json.dumps({"prompt": "task", "asked": "why?", "how": how}) + "\n"
            for how in ("silent", "fine")
        )
    )
    agent = "environment.agent=tests.agents.openai_agents:misbehaves"
    arguments = (model, "--prompts", tasks, "--max-new-tokens", 20, "--json", agent)
    code, out, _ = aligner_evaluate(*arguments)
    metrics = json.loads(out)
    assert (code, metrics["eval/lost_episodes"], metrics["eval/score"]) == (0, 1.0, 0.0)


def test_evaluation_reports_means_of_metrics(tmp_path: Path, aligner_evaluate: Evaluate) -> None:
    (tmp_path / "model").mkdir()
    model = saved(tmp_path / "model", "chatml")
    tasks = tmp_path / "tasks.jsonl"
    lines = [
        {"prompt": "task", "at": 0, "lost_attempts": [1], "log": str(tmp_path / "log")},
        {"prompt": "task", "at": 1, "log": str(tmp_path / "log")},
    ]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    agent = "environment.agent=tests.agents.crediting_agents:reports"
    arguments = (model, "--prompts", tasks, "--max-new-tokens", 20, "--json", agent)
    code, out, _ = aligner_evaluate(*arguments)
    metrics = json.loads(out)
    # one agent reports its second attempt, and only that one
    assert (code, metrics["eval/metrics/attempts"]) == (0, 1.5)
    assert (metrics["eval/metrics/only/1"], metrics["eval/metrics/only/2"]) == (1.5, 1.5)


def test_repeated_evaluation_uses_judge_cache(
    model: Path,
    initial: Path,
    prompts: Path,
    tmp_path: Path,
    aligner_evaluate: Evaluate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path / "cache"))
    output = tmp_path / "samples.jsonl"
    with judging(lambda question, _: says("VERDICT: A", tokens_in=len(question))) as server:
        asked = [
            f"evaluation.judge.judge_{name}"
            for name in (f"url={server.url}", "model=tester", "input_price=1000")
        ]
        arguments = (
            model,
            *asked,
            "--prompts",
            prompts,
            *OPTIONS,
            "--reference",
            initial,
            "--json",
            "--output",
            output,
        )
        code, out, error = aligner_evaluate(*arguments)
        assert (code, error) == (0, "")
        metrics, again = json.loads(out), json.loads(aligner_evaluate(*arguments, "--overwrite")[1])
        assert len(server.asked) == 2 * len(PROMPTS)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["judge_wins"] for record in records] == [[1.0, 0.0]] * 3
    assert all("12x" in question for question in server.questions if "a b" in question)
    assert (
        metrics["eval/judge_win_rate"],
        metrics["eval/judge_ties"],
        metrics["eval/judge_order_bias"],
    ) == (0.5, 1.0, 1.0)
    assert (
        metrics["judge/questions"] == again["judge/from_cache"] == 6
        and again["judge/questions"] == 0
    )
    assert metrics["judge/cost"] == pytest.approx(sum(map(len, server.questions)) * 1000 / 1e6)
    assert all(
        again[name] == measured
        for name, measured in metrics.items()
        if not name.startswith("judge/")
    )


def test_greedy_model_ties_with_itself(
    model: Path, tmp_path: Path, aligner_evaluate: Evaluate
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n2+2=\n")
    code, out, _ = aligner_evaluate(model, "--prompts", prompts, *OPTIONS, "--reference", model)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].strip() == "2 prompts, 2 responses"
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip()
        for line in lines
        if line.startswith("│")
    }
    assert rows["win_rate"].startswith("0.500 [") and rows["length"] == "6.000"
    assert rows.keys() == {"score", "pass@1", "win_rate", "length", "reference_perplexity"}


def test_without_references_there_is_no_win_rate(
    model: Path, tmp_path: Path, aligner_evaluate: Evaluate
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    code, out, _ = aligner_evaluate(model, "--prompts", prompts, *OPTIONS, "--json")
    assert code == 0
    assert {name for name in json.loads(out) if not name.endswith(("_low", "_high"))} == {
        *("prompts", "samples", "eval/score", "eval/pass@1", "eval/length")
    }


def test_invalid_input_is_refused_before_generation(
    model: Path, initial: Path, prompts: Path, tmp_path: Path, aligner_evaluate: Evaluate
) -> None:
    def usage_error(*arguments: Any) -> str:
        code, out, error = aligner_evaluate(model, "--prompts", prompts, *arguments)
        assert (code, out) == (2, "")
        return error

    asked = (
        "evaluation.judge.judge_url=http://localhost:1/v1",
        "evaluation.judge.judge_model=tester",
    )
    assert "evaluation.judge.judge_model: missing" in usage_error(*OPTIONS, asked[0])
    assert "reward.kind: is not supported by `aligner evaluate`" in usage_error(
        *OPTIONS, "reward.kind=judge"
    )
    plain = tmp_path / "plain.txt"
    plain.write_text("hello\n")
    code, _, error = aligner_evaluate(model, "--prompts", plain, *OPTIONS, *asked)
    assert (
        code == 2
        and "evaluation.judge: requires references to compare with; add a `reference` to every prompt"
        in error
    )
    assert "2 of 3 prompts have no `reference`; the first is 'hello'" in usage_error(*OPTIONS)
    assert "--function=digit: must be one of" in usage_error("--function", "digit")
    assert "2 samples per prompt with greedy decoding would be identical" in usage_error(
        *OPTIONS, "--samples", 2, "--greedy"
    )
    other = tmp_path / "other"
    other.mkdir()
    for file in initial.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(
        json.dumps(tokenizer | {"added_tokens": tokenizer["added_tokens"][:1]})
    )
    assert "differs from the tokenizer of SOURCE" in usage_error(*OPTIONS, "--reference", other)
    critic = tmp_path / "critic"
    save_critic(model, str(critic))
    assert (
        f"error: --reference={critic}: is a value or reward model, which does not"
        in usage_error(*OPTIONS, "--reference", critic)
    )
    (critic / "config.json").write_text("[]")
    assert f"error: --reference={critic}: config.json must be a JSON object" in usage_error(
        *OPTIONS, "--reference", critic
    )
    prompts.write_text('{"prompt": "a", "reference": 1}\n')
    assert "the `reference` of the prompt 'a' must be a string" in usage_error(*OPTIONS)


def test_invalid_suite_option_is_refused(
    model: Path, prompts: Path, tmp_path: Path, aligner_evaluate: Evaluate
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    overrides = (
        "experiment=tiny_ppo",
        f"run.dir={run}",
        "reward=remote",
        "reward.url=http://localhost:1/score",
        "evaluation.every=1",
        f"evaluation.path={prompts}",
        "+evaluation.suites.one={prompts: [a], environment: {agent: 'tests.agents:absent'}}",
    )
    save_config(compose_config([*overrides]), run / "config.yaml")

    def usage_error(*arguments: Any) -> str:
        code, out, error = aligner_evaluate(*arguments)
        assert (code, out) == (2, "")
        return error

    assert "--prompts: is required; set --prompts FILE, or --suite NAME" in usage_error(model)
    assert f"--suite one: {model} is not the directory" in usage_error(model, "--suite", "one")
    assert "--suite two: the run has no such evaluation suite; allowed: evaluation, one" in (
        usage_error(run, "--suite", "two")
    )
    assert "--prompts-format: is not supported with --suite" in usage_error(
        run, "--suite", "one", "--prompts-format", "txt"
    )
    assert "environment.max_turns=1: is not supported with --suite" in usage_error(
        run, "--suite", "one", "environment.max_turns=1"
    )
    # an HTTP service, which the command does not call
    assert "--function: is required, because the reward of the run" in usage_error(
        run, "--suite", "one"
    )
