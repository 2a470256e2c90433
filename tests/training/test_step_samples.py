"""Test the sample files of training steps."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aligner.config.compose import compose_config
from aligner.data.model_directory import prepare_model
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Experience, Prompt, Sample, collate_episodes
from aligner.files import get_temporary_path
from aligner.observability.sample_files import SampleFiles, read_samples
from aligner.paths import RunPaths
from aligner.training.partial_rollouts import PartialRollout
from aligner.training.rollout_builder import RolloutBatch
from aligner.training.services import PendingRows
from aligner.training.step_samples import SampleRecorder, StepSamples

NAN = float("nan")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    run = tmp_path_factory.mktemp("model")
    return Tokenizer(prepare_model(compose_config(["experiment=tiny_ppo", f"run.dir={run}"])))


def sample(tokenizer: Tokenizer, prompt: Prompt, index: int, text: str, **others: Any) -> Sample:
    response = tokenizer.encode(text)
    length = len(response)
    logprobs, versions = -torch.arange(1.0, length + 1), torch.arange(length) // 2 + 3
    if (drawn := others.get("generated_mask")) is not None:
        logprobs, versions = logprobs * drawn, versions * drawn
    tokens = torch.cat([prompt.tokens, response])
    return Sample(
        prompt.id,
        index,
        tokens,
        len(prompt.tokens),
        logprobs,
        versions,
        "stop",
        prompt.metadata,
        **others,
    )


def experience_of_rows(rollout: RolloutBatch, rows: list[int], **quantities: float) -> Experience:
    """Return an experience of some rows; each quantity is the row's number plus the given value."""
    batch = replace(rollout.batch, row_ids=torch.arange(len(rollout.batch.tokens))).select(
        torch.tensor(rows)
    )

    def table(value: float) -> Tensor:
        return torch.where(batch.mask, torch.tensor(rows)[:, None] + value, 0.0)

    names = ("rewards", "old_logprobs", "reference_logprobs", "advantages")
    tables = {name: table(quantities.get(name, 0.0)) for name in names}
    return Experience(
        **vars(batch), scores=torch.zeros(len(rows)), values=None, returns=None, **tables
    )


def write_and_read(
    directory: Path, tokenizer: Tokenizer, samples: StepSamples, *sources: str
) -> list[tuple[dict, dict]]:
    """Write samples and read them back; return each row with its lists of tokens."""
    recorder = SampleRecorder(
        SampleFiles(RunPaths(directory).sample_files, 8),
        tokenizer,
        lambda prompt: (prompt % 5, prompt // 5),
        sources,
    )
    recorder.write(12, samples)
    recorder.wait_until_written(12)
    rows, lists = (read_samples(directory, tokens=tokens).to_pylist() for tokens in (False, True))
    return list(zip(rows, lists, strict=True))


def test_recorded_rows_keep_sample_order(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompts = [
        Prompt(7, "ab", tokenizer.encode("ab"), {"answer": "é"}),
        Prompt(8, "c", tokenizer.encode("c")),
    ]
    texts = [
        (prompts[0], 0, "12"),
        (prompts[0], 1, "345"),
        (prompts[1], 0, "6"),
        (prompts[1], 1, "7"),
    ]
    samples = [sample(tokenizer, *each) for each in texts]
    batch, pending = collate_episodes(samples, tokenizer.pad_token_id), PendingRows(())
    rollout = RolloutBatch([prompt for prompt, *_ in texts], samples, batch, pending, pending)
    experience = experience_of_rows(
        rollout, [3, 1], old_logprobs=0.25, reference_logprobs=0.5, advantages=-4
    )
    scores = torch.tensor([1.0, 2.0, NAN, 4.0])
    parts = torch.stack([scores - 3, torch.full((4,), 3.0)], 1)
    found = write_and_read(
        tmp_path, tokenizer, StepSamples(rollout, scores, parts, experience), "math", "length"
    )
    rows, lists = zip(*found, strict=True)
    assert [(row["group"], row["sample"], row["prompt_index"], row["epoch"]) for row in rows] == [
        *((0, 0, 2, 1), (0, 1, 2, 1), (1, 0, 3, 1), (1, 1, 3, 1))
    ]
    assert [row["response"] for row in rows] == ["12", "345", "6", "7"]
    assert [row["score"] for row in rows] == [1, 2, None, 4]
    assert (
        rows[1]["score_parts"] == [("math", -1.0), ("length", 3.0)]
        and rows[2]["score_parts"] is None
    )
    assert [row["advantage"] for row in rows] == [None, -3, None, -1]
    assert [(row["prompt"], row["metadata"]) for row in rows[1:3]] == [
        ("ab", '{"answer": "é"}'),
        ("c", None),
    ]
    assert (rows[1]["version_first"], rows[1]["version_last"], rows[1]["messages"]) == (3, 4, None)
    assert lists[1]["text"] == ["3", "4", "5"] and lists[1]["engine_logprob"] == [-1, -2, -3]
    assert lists[1]["trainer_logprob"] == [1.25] * 3 and lists[3]["reference_logprob"] == [3.5]
    assert lists[0]["trainer_logprob"] == [None] * 2 and lists[0]["version"] == [3, 3]


def test_episode_rows_mark_tokens_and_list_branches(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompt = Prompt(0, "ab", tokenizer.encode("ab"))
    given = torch.tensor([True, True, False, True])
    branch = sample(tokenizer, Prompt(0, "", tokenizer.encode("abx")), 1, "9")
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.5])
    alone = sample(tokenizer, prompt, 0, "1", rewards=torch.zeros(1))
    samples = [
        alone,
        sample(
            tokenizer, prompt, 1, "12z4", generated_mask=given, rewards=rewards, branches=(branch,)
        ),
    ]
    batch, pending = collate_episodes(samples, tokenizer.pad_token_id), PendingRows(())
    rollout = RolloutBatch([prompt] * 2, samples, batch, pending, pending)
    experience = experience_of_rows(rollout, [0, 1, 2])
    found = write_and_read(
        tmp_path, tokenizer, StepSamples(rollout, torch.tensor([0.0, 1.5]), None, experience)
    )
    assert [(row["sample"], row["branch"], row["advantage"], row["score"]) for row, _ in found] == [
        *((0, 0, 0, 0), (1, 0, 1, 1.5), (1, 1, 2, 1.5))
    ]
    row, lists = found[1]
    assert json.loads(row["messages"]) == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "12"},
        {"role": "environment", "content": "z"},
        {"role": "assistant", "content": "4"},
    ]
    assert (row["response_tokens"], row["drawn_tokens"], found[2][0]["prompt"]) == (4, 3, "abx")
    assert lists["drawn"] == given.tolist() and lists["text"] == list("12z4")
    for name in ("engine_logprob", "version", "trainer_logprob", "advantage"):
        assert [value is not None for value in lists[name]] == given.tolist()


def test_replaced_samples_are_recorded_last(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompts = [
        Prompt(number, text, tokenizer.encode(text)) for number, text in enumerate(("a", "bcd"))
    ]
    taken = [
        sample(tokenizer, prompts[1], 0, "2", branches=(sample(tokenizer, prompts[1], 0, "77"),))
    ]
    replaced = PartialRollout(prompts[0], (sample(tokenizer, prompts[0], 0, "12345678"),))
    scored: Future[Tensor] = Future()
    # in the order of generation
    scored.set_result(torch.tensor([[1.0, 0.25, 0.75], [2.0, 2.0, 0.0]]))
    scores, batch = (
        PendingRows((scored,), torch.tensor([1])),
        collate_episodes(taken, tokenizer.pad_token_id),
    )
    rollout = RolloutBatch(prompts[1:], taken, batch, scores, PendingRows(()), replaced=(replaced,))
    found = write_and_read(
        tmp_path,
        tokenizer,
        StepSamples.from_rollout(rollout, experience_of_rows(rollout, [1, 0])),
        "math",
        "length",
    )
    assert [
        (row["group"], row["branch"], row["response"], row["score"], row["advantage"])
        for row, _ in found
    ] == [*((0, 0, "2", 2, 0), (0, 1, "77", 2, 1), (1, 0, "12345678", 1, None))]
    assert found[2][0]["score_parts"] == [("math", 0.25), ("length", 0.75)]
    assert [lists["trainer_logprob"] for _, lists in found] == [[0], [1, 1], [None] * 8]


def test_write_error_is_raised_when_step_settles(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompt = Prompt(0, "ab", tokenizer.encode("ab"))
    samples, pending = [sample(tokenizer, prompt, 0, "1")], PendingRows(())
    rollout = RolloutBatch(
        [prompt], samples, collate_episodes(samples, tokenizer.pad_token_id), pending, pending
    )
    directory = RunPaths(tmp_path).sample_files
    get_temporary_path(directory / "step_000002.parquet").mkdir(parents=True)
    recorder = SampleRecorder(
        SampleFiles(directory, 8), tokenizer, lambda prompt: (0, 0), ["reward"]
    )
    for step in (1, 2):
        recorder.write(step, StepSamples(rollout, torch.ones(1)))
    recorder.wait_until_written(1)
    with pytest.raises(OSError, match=r"step_000002\.parquet"):
        recorder.wait_until_written(2)
