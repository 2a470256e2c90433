"""Test preference pairs and demonstrations that are built from samples."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from aligner.algorithms.selections import all_pairs, rejection_sampled_rows
from aligner.config.compose import compose_config
from aligner.data.examples import open_demonstrations, open_preferences
from aligner.data.model_directory import prepare_model
from aligner.data.prompts import open_prompts
from aligner.data.tokenizer import Tokenizer, read_tokenizer
from aligner.data.types import Prompt, Sample, collate
from aligner.errors import AlignerError, ConfigError
from aligner.paths import RunPaths
from aligner.rewards.sources import ModelSource, ScoringBatch
from aligner.schema import DataConfig
from aligner.training.evaluator import build_reference_samples
from aligner.training.offline import pad_demonstrations
from aligner.training.preference_sampling import PairWriter, build_preferences
from aligner.training.rollout_builder import RolloutBatch
from aligner.training.services import PendingRows


def test_pairs_require_different_texts_and_scores(tmp_path) -> None:
    tokenizer = Tokenizer(
        prepare_model(compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path}"]))
    )
    end = tokenizer.eos_token_ids[0]

    def sample(prompt: int, index: int, text: str, *special: int) -> Sample:
        response = torch.cat([tokenizer.encode(text), torch.tensor(special, dtype=torch.int64)])
        tokens, length = torch.cat([tokenizer.encode("ab"), response]), len(response)
        return Sample(
            prompt,
            index,
            tokens,
            2,
            torch.zeros(length),
            torch.zeros(length, dtype=torch.int64),
            "length",
        )

    groups = [
        [sample(0, 0, "1"), sample(0, 1, "22", end), sample(0, 2, "333")],
        [sample(1, 0, "1"), sample(1, 1, "2"), sample(1, 2, "3")],  # equal scores
        # the best and the worst sample have the same text
        [sample(2, 0, "1"), sample(2, 1, "1", end), sample(2, 2, "2")],
        [sample(3, 0, "1"), sample(3, 1, "", end), sample(3, 2, "2")],  # the worst sample is empty
    ]
    scores = torch.tensor([0.5, 2.0, -1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.5, 1.0, 0.0, 0.5])
    samples = [each for group in groups for each in group]
    prompts = [Prompt(each.prompt_id, "ab", tokenizer.encode("ab")) for each in samples]
    pending = PendingRows(())
    rollout = RolloutBatch(
        prompts, samples, collate(samples, tokenizer.pad_token_id), pending, pending
    )
    assert build_preferences(rollout, scores, 3, tokenizer) == (
        [
            {
                "prompt": "ab",
                "chosen": "22",
                "rejected": "333",
                "margin": 3.0,
                "scores": [2.0, -1.0],
                "prompt_tokens": tokenizer.encode("ab").tolist(),
                "chosen_tokens": [*tokenizer.encode("22").tolist(), end],
                "rejected_tokens": tokenizer.encode("333").tolist(),
            }
        ],
        3,
    )
    records, without = build_preferences(rollout, scores, 3, tokenizer, pair_selection="all")
    assert [(each["chosen"], each["rejected"], each["margin"]) for each in records] == [
        *(("22", "1", 1.5), ("22", "333", 3.0), ("1", "333", 1.5)),
        *(("1", "2", 0.5), ("2", "1", 0.5)),  # the texts of scores 1, 0.5 and 0 are 1, 2 and 1
        ("1", "2", 0.5),
    ]
    assert without == 1


def test_all_pairs_function_equals_nested_loops() -> None:
    scores = torch.tensor([1.0, 3.0, 1.0, 2.0, 5.0, 5.0, 5.0, 5.0])
    pairs = all_pairs(scores, 4).view(-1, 2).tolist()
    assert pairs == [[1, 3], [1, 0], [1, 2], [3, 0], [3, 2]]
    chance = torch.randint(3, (60,), generator=torch.Generator().manual_seed(0)).float()
    expected = {
        (i, j) for i in range(60) for j in range(60) if i // 5 == j // 5 and chance[i] > chance[j]
    }
    assert {tuple(pair) for pair in all_pairs(chance, 5).view(-1, 2).tolist()} == expected


@dataclass
class Weighted:
    """Reward model whose reward depends on every token."""

    def values(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return (tokens * torch.arange(1, tokens.shape[1] + 1)).cumsum(1).float()


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Tokenizer:
    """Tokenizer with the three end tokens of Llama 3.1: of a text, a message and a turn."""
    config = compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path_factory.mktemp('run')}"])
    directory = shutil.copytree(prepare_model(config), tmp_path_factory.mktemp("llama") / "model")
    tokenizer = read_tokenizer(directory)
    tokenizer.add_special_tokens(["<|eom_id|>", "<|eot_id|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    shape = json.loads((directory / "config.json").read_text())
    ends = [
        shape["eos_token_id"],
        tokenizer.token_to_id("<|eom_id|>"),
        tokenizer.token_to_id("<|eot_id|>"),
    ]
    shape |= {"eos_token_id": ends, "vocab_size": tokenizer.get_vocab_size()}
    (directory / "config.json").write_text(json.dumps(shape))
    return Tokenizer(directory)


def make_sample(tokenizer: Tokenizer, prompt: int, index: int, text: str, *end: int) -> Sample:
    response = torch.cat([tokenizer.encode(text), torch.tensor(end, dtype=torch.int64)])
    tokens, length, reason = (
        torch.cat([tokenizer.encode("ab"), response]),
        len(response),
        "stop" if end else "length",
    )
    return Sample(prompt, index, tokens, 2, torch.zeros(length), torch.zeros(length).long(), reason)


@pytest.mark.promise("sampled-preferences-keep-tokens")
def test_sampled_pair_is_read_with_same_tokens(llama, tmp_path) -> None:
    first, other, turn = llama.eos_token_ids
    samples = [
        make_sample(llama, 0, 0, "12", turn),
        make_sample(llama, 0, 1, "3", first),
        make_sample(llama, 1, 0, "4", other),
        make_sample(llama, 1, 1, "567"),  # truncated
    ]
    prompts = [Prompt(each.prompt_id, "ab", llama.encode("ab")) for each in samples]
    batch, pending, scores = (
        collate(samples, llama.pad_token_id),
        PendingRows(()),
        torch.tensor([2.0, 1.0, 2.0, 1.0]),
    )
    rollout = RolloutBatch(prompts, samples, batch, pending, pending)
    paths = RunPaths(tmp_path)
    writer = PairWriter(paths, llama)
    records, _ = build_preferences(rollout, scores, 2, llama)
    writer.write(1, records, rollout, scores)
    writer.finish()

    pairs = open_preferences(DataConfig(path=str(paths.preferences), shuffle=False), llama, 1).take(
        0, 2
    )
    read = [member for pair in pairs for member in (pair.chosen, pair.rejected)]
    given = open_demonstrations(
        DataConfig(path=str(paths.responses), shuffle=False), llama, 1
    ).take(0, 4)
    for members in (read, given):
        assert [member.tokens.tolist() for member in members] == [
            sample.tokens.tolist() for sample in samples
        ]
    rows, model = pad_demonstrations(read, llama.pad_token_id), ModelSource("judge", Weighted())
    assert torch.equal(
        model.compute_raw_scores(ScoringBatch(list, rows.tokens, rows.lengths)),
        model.compute_raw_scores(ScoringBatch(list, batch.tokens, batch.lengths)),
    )
    # Samples of another model: the texts are tokenized, and get the end token of this model.
    pairs = open_preferences(
        DataConfig(path=str(paths.preferences), shuffle=False, generated_tokens=False), llama, 1
    ).take(0, 2)
    assert [pair.chosen.tokens[-1] for pair in pairs] == [first, first]


def test_kept_responses_respect_mode_and_min_score() -> None:
    scores = torch.tensor([1.0, 3.0, 3.0, 0.0, 0.5, 0.0, 2.0, 2.0, 2.0])
    assert rejection_sampled_rows(scores, 3, "all", None).tolist() == list(range(9))
    assert rejection_sampled_rows(scores, 3, "all", 2.0).tolist() == [1, 2, 6, 7, 8]
    assert rejection_sampled_rows(scores, 3, "best", None).tolist() == [1, 4, 6]
    assert rejection_sampled_rows(scores, 3, "best", 1.0).tolist() == [1, 6]


def test_demonstration_is_chosen_over_other_texts(llama, tmp_path) -> None:
    first, _, turn = llama.eos_token_ids
    samples = [
        make_sample(llama, 0, 0, "13", turn),
        make_sample(llama, 0, 1, "12", turn),
        make_sample(llama, 1, 0, "4"),
    ]
    samples.append(make_sample(llama, 1, 1, "", turn))
    (tmp_path / "data.jsonl").write_text(
        '{"prompt": "ab", "response": "12", "by": "me"}\n'
        f'{{"prompt": "ab", "response": "7", "response_tokens": {llama.encode("7").tolist()}}}\n'
    )
    source = DataConfig(path=str(tmp_path / "data.jsonl"), shuffle=False)
    demonstrated, truncated = open_prompts(source, llama, 1, include_responses=True).take(0, 2)
    assert demonstrated.metadata == {
        "response": "12",
        "by": "me",
        "response_tokens": [*llama.encode("12").tolist(), first],
    }
    rollout = RolloutBatch(
        [demonstrated, demonstrated, truncated, truncated],
        samples,
        collate(samples, 0),
        PendingRows(()),
        PendingRows(()),
    )
    records, without = build_preferences(
        rollout, torch.zeros(4), 2, llama, pair_selection="demonstration"
    )
    assert [(each["chosen"], each["rejected"]) for each in records] == [("12", "13"), ("7", "4")]
    assert "margin" not in records[0] and without == 0
    writer = PairWriter(RunPaths(tmp_path), llama)
    assert writer.write(1, records, rollout, torch.zeros(4), [0, 3]) == 1, (
        "one that says nothing is not kept"
    )
    writer.finish()
    pairs = open_preferences(
        DataConfig(path=str(RunPaths(tmp_path).preferences), shuffle=False), llama, 1
    ).take(0, 2)
    read = [pair.chosen.tokens[2:].tolist() for pair in pairs]
    assert read == [
        [*llama.encode("12").tolist(), first],
        llama.encode("7").tolist(),
    ], "as it was drawn, else with an end"
    (tmp_path / "data.jsonl").write_text('{"prompt": "ab"}\n')
    with pytest.raises(ConfigError, match=r"data\.jsonl:1: record lacks field `response`"):
        open_prompts(source, llama, 1, include_responses=True)


def test_responses_keep_masks_of_generated_tokens(llama, tmp_path) -> None:
    length, further = len(llama.encode("ab34")), make_sample(llama, 0, 0, "345")
    branch = replace(
        further,
        prompt_length=length,
        engine_logprobs=torch.zeros(1),
        weight_versions=torch.zeros(1).long(),
    )
    episode = replace(
        make_sample(llama, 0, 0, "12"),
        generated_mask=torch.tensor([True, False]),
        branches=(branch,),
    )
    prompt = Prompt(0, "ab", llama.encode("ab"), {"question": "a", "answer": "b"})
    rollout = RolloutBatch(
        [prompt], [episode], collate([episode], 0), PendingRows(()), PendingRows(())
    )
    paths = RunPaths(tmp_path)
    writer = PairWriter(paths, llama, has_pairs=False, kept_fields=["question"])
    writer.write(1, [], rollout, torch.ones(1), [])
    with pytest.raises(AlignerError, match=r"no samples to write: .* algorithm\.min_score"):
        writer.finish()
    writer.write(2, [], rollout, torch.ones(1), [0])
    writer.finish()
    assert not paths.preferences.exists()
    kept = [json.loads(line) for line in paths.responses.read_text().splitlines()]
    assert [record["question"] for record in kept] == ["a", "a"] and "answer" not in kept[0]
    first, read = open_demonstrations(
        DataConfig(path=str(paths.responses), shuffle=False), llama, 1
    ).take(0, 2)
    assert (first.tokens.tolist(), first.prompt_length) == (
        branch.tokens.tolist(),
        length,
    ), "a branch with what it read"
    assert (read.tokens.tolist(), read.response_mask.tolist()) == (
        episode.tokens.tolist(),
        [False, False, True, False],
    )


def test_sampled_reference_keeps_its_end_token(llama) -> None:
    first, _, turn = llama.eos_token_ids
    text = llama.encode("12").tolist()
    given = [{"reference_tokens": [*text, turn]}, {"reference_tokens": text}, {}]
    prompts = [
        Prompt(place, "ab", llama.encode("ab"), {"reference": "12", **each})
        for place, each in enumerate(given)
    ]
    samples = build_reference_samples(prompts, [], llama, append_end=True)
    assert [sample.response.tolist() for sample in samples] == [[*text, turn], text, [*text, first]]
    assert [sample.finish_reason for sample in samples] == ["stop", "length", "stop"]
    wrong = Prompt(0, "ab", llama.encode("ab"), {"reference": "13", "reference_tokens": text})
    with pytest.raises(
        ConfigError,
        match="the prompt 'ab': `reference_tokens` and `reference` differ: this model's tokenizer",
    ):
        build_reference_samples([wrong], [], llama, append_end=True)
