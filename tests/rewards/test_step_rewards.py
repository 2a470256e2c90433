"""Step rewards: their token positions, their sums, and their path to the trainer."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.data.types import Sample, collate_episodes
from aligner.errors import ConfigError
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.scorers import ScoringError, call_step_scorer, resolve_step_scorer
from aligner.rewards.sources import CombinedReward, ModelSource, StepSource, TextSource
from aligner.schema.reward_sources import FunctionSource
from aligner.servers.remote_client import join_scores, parse_scores
from aligner.servers.reward_server import RewardRank
from aligner.training.services import PendingRows
from tests.servers.role_main import LIMITS

NAN = math.nan
PROMPT, RESPONSES = "ab", ["1a.2b. c", ".", "abc", "a."]


def character_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per character; token 0 is padding, token 1 is `<eos>`."""
    tokenizer = Tokenizer(
        models.WordLevel(
            {"<pad>": 0, "<eos>": 1} | {each: 2 + n for n, each in enumerate("abc12. ")}, "<pad>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return tokenizer


def source(**numbers: Any) -> FunctionSource:
    return FunctionSource(name="steps", key="reward", function="own:steps", **numbers)


def dots(requests):
    """End a step after each dot; its reward is 1 if it contains a digit, otherwise 0.25."""
    found = []
    for request in requests:
        ends = [place + 1 for place, character in enumerate(request.response) if character == "."]
        parts = [request.response[first:end] for first, end in zip([0, *ends], ends, strict=False)]
        found.append(
            [
                (end, 1.0 if any(map(str.isdigit, part)) else 0.25)
                for end, part in zip(ends, parts, strict=True)
            ]
        )
    return found


def tokens_of(tokenizer, ended: bool = True):
    """Return right-padded rows of prompt, response and `<eos>`, their lengths and prompt lengths."""
    prompt = tokenizer.encode(PROMPT).ids
    rows = [prompt + tokenizer.encode(text).ids + [1] * ended for text in RESPONSES]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
    return tokens, torch.tensor([len(row) for row in rows]), torch.full((len(rows),), len(prompt))


def score_batch(reward, **given):
    return RewardRank(reward, character_tokenizer(), LIMITS).score(
        *tokens_of(character_tokenizer()), **given
    )


def test_step_rewards_are_at_end_tokens_of_steps():
    parts = [
        (source(weight=2.0, gain=3.0, bias=-1.0), StepSource("steps", dots)),
        (
            source().model_copy(update={"name": "whole"}),
            TextSource("whole", lambda requests: [10.0] * len(requests)),
        ),
    ]
    found = score_batch(CombinedReward(parts))
    steps = found["steps"]
    expected = torch.full((4, steps.shape[1]), torch.nan)
    for row, text in enumerate(RESPONSES):
        for end, reward in dots([ScoringRequest("", text)])[0]:
            expected[row, len(PROMPT) + end - 1] = 2 * (3 * reward - 1)
    assert torch.equal(steps.nan_to_num(99), expected.nan_to_num(99)), (
        "a step that is worth nothing is one"
    )
    assert torch.allclose(found["rewards"], expected.nansum(1) + 10)
    assert torch.allclose(found["0"], expected.nansum(1)) and found["1"].tolist() == [10.0] * 4


def test_source_weight_0_for_a_task_gives_no_step_rewards():
    parts = [
        (source(task_weights={"chat": 0.0}), StepSource("steps", dots)),
        (
            source().model_copy(update={"name": "whole"}),
            TextSource("whole", lambda requests: [10.0] * len(requests)),
        ),
    ]
    found = score_batch(
        CombinedReward(parts), metadata=['{"task": "chat"}', "{}", '{"task": "chat"}', "{}"]
    )
    assert found["steps"].nansum(1).tolist() == [0.0, 0.25, 0.0, 0.25]
    assert found["rewards"].tolist() == [10.0, 10.25, 10.0, 10.25]


def test_texts_without_tokens_get_only_total_reward():
    found = RewardRank(
        CombinedReward([(source(), StepSource("steps", dots))]), character_tokenizer(), LIMITS
    ).score(texts=["1.a.", "."])
    assert found["rewards"].tolist() == [1.25, 0.25] and "steps" not in found


def test_step_ends_at_token_of_its_last_character():
    """Tokens may contain several characters, and characters may need several tokens."""
    text = "First: 12+30 is 42.\nSecond, naïve 漢字 🙂 done."
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["First: Second, done is"] * 9, BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    )
    row = tokenizer.encode(text).ids
    assert tokenizer.decode(row) == text and min(map(len, tokenizer.encode("First").tokens)) > 1
    batch = torch.tensor([[7, 7, *row, 0, 0]]), torch.tensor([2 + len(row)]), torch.tensor([2])
    scoring = RewardRank(CombinedReward([]), tokenizer, LIMITS)
    for characters in range(1, len(text) + 1):
        whole = next(
            n for n in range(1, len(row) + 1) if len(tokenizer.decode(row[:n])) >= characters
        )
        assert scoring._find_token(*batch, 0, characters) == 2 + whole - 1
    assert scoring._find_token(*batch, 0, 10**6) == 2 + len(row) - 1


@dataclass
class Places:
    """A model whose value at a token is the token's position minus 4."""

    def values(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return (torch.arange(tokens.shape[1]).float() - 4).expand(tokens.shape)


@pytest.mark.parametrize("probability", [True, False])
def test_process_reward_model_is_read_at_step_ends(probability):
    model = ModelSource("judge", Places(), step_separator=".", step_probability=probability)
    found = score_batch(CombinedReward([(source(), model)]))
    ends = [[4, 7, 10], [2], [5], [3]]  # text after the last dot is a step too
    for row, places in enumerate(ends):
        numbers = {
            place: 1 / (1 + math.exp(4 - place)) if probability else place - 4.0 for place in places
        }
        assert found["steps"][row].tolist() == pytest.approx(
            [numbers.get(place, NAN) for place in range(11)], nan_ok=True
        )
        assert float(found["rewards"][row]) == pytest.approx(sum(numbers.values()))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            [(4, 1.0)],
            "returned a step that ends at character 4 for prompt 'p' and response 'abc';"
            " must end at 1 to 3, the length of the response",
        ),
        ([(0, 1.0)], "returned a step that ends at character 0 for prompt 'p' and response 'abc'"),
        ([(1, math.nan)], "returned nan for prompt 'p' and response 'abc'; must be finite"),
        (0.5, "returned .* for prompt 'p' and response 'abc'; must be a number"),
        ([(1.5, 1.0)], "returned .* for prompt 'p' and response 'abc'; must be a number"),
    ],
)
def test_invalid_steps_are_refused_with_their_prompt(answer, message):
    with pytest.raises(ScoringError, match=f"the scorer mine {message}"):
        call_step_scorer("mine", lambda requests: [answer], [ScoringRequest("p", "abc")])


def test_custom_function_returns_step_rewards():
    scorer = resolve_step_scorer("tests.rewards.test_step_rewards:dots", "reward.function", 60)
    assert call_step_scorer(
        "dots", scorer, [ScoringRequest("p", "1.a."), ScoringRequest("p", "")]
    ) == [[(2, 1.0), (4, 0.25)], []]


def completed_scores(**columns) -> Future[Tensor]:
    done: Future[Tensor] = Future()
    done.set_result(
        parse_scores({name: np.array(values, dtype=np.float32) for name, values in columns.items()})
    )
    return done


def test_scores_and_steps_are_joined_across_requests():
    refused: Future[Tensor] = Future()
    refused.set_result(torch.full((1,), torch.nan))
    futures = (
        completed_scores(rewards=[[3.0]], reward_parts=[[1.0, 2.0]], step_rewards=[[NAN, 1.0]]),
        refused,
        completed_scores(
            rewards=[[7.0]], reward_parts=[[3.0, 4.0]], step_rewards=[[NAN, 0.0, NAN, 2.0]]
        ),
    )
    pending = PendingRows(futures, torch.tensor([0, 2]), source_count=2)
    assert pending.result().tolist() == [3.0, 7.0]
    assert pending.get_source_scores().tolist() == [[1.0, 2.0], [3.0, 4.0]]
    for row, expected in zip(
        pending.get_step_rewards(5), ([NAN, 1, NAN, NAN, NAN], [NAN, 0, NAN, 2, NAN]), strict=True
    ):
        assert row.tolist() == pytest.approx(expected, nan_ok=True)
    assert pending.select(torch.tensor([1])).get_step_rewards(3).tolist()[0] == pytest.approx(
        [NAN, 0, NAN], nan_ok=True
    )
    one = PendingRows(
        (completed_scores(rewards=[[3.0]], step_rewards=[[0.0, 1.0]]),), source_count=0
    )
    assert (
        one.get_source_scores() is None
        and one.get_step_rewards(2).tolist() == [[0, 1]]
        and one.result().tolist() == [3.0]
    )
    assert (
        PendingRows((completed_scores(rewards=[[3.0]]),), source_count=0)
        .get_step_rewards(2)
        .isnan()
        .all()
    )
    assert join_scores([torch.ones(2), torch.zeros(1)]).tolist() == [1, 1, 0]


def test_step_rewards_add_to_environment_rewards():
    def sample(prompt_id, response, rewards=None, **more):
        tokens = torch.tensor([5, *response])
        versions = torch.zeros(len(response), dtype=torch.int64)
        return Sample(
            prompt_id,
            0,
            tokens,
            1,
            torch.zeros(len(response)),
            versions,
            "stop",
            rewards=rewards,
            **more,
        )

    branch = sample(0, [6, 7, 8])
    batch = collate_episodes(
        [sample(0, [6, 7], torch.tensor([0.5, 0.0]), branches=(branch,)), sample(1, [9])], 0
    )
    given = batch.with_step_rewards(torch.tensor([[1.0, NAN, 9.0], [0.0, 9.0, 9.0]]))
    assert given.step_ends.tolist() == [[True, False, False], [True, False, False], [False] * 3]
    assert given.turn_rewards.tolist() == [[1.5, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert collate_episodes([sample(1, [9])], 0).with_step_rewards(
        torch.tensor([[4.0]])
    ).turn_rewards.tolist() == [[4.0]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["algorithm=grpo", "algorithm.advantage=grpo_steps"],
            "algorithm.advantage=grpo_steps: requires a reward for each step",
        ),
        (
            ["reward.step_rewards=true"],
            "reward.step_rewards=true: digit_fraction returns one number per response",
        ),
        (
            ["reward.function=my:steps", "reward.step_rewards=true", "critic.with_reward=true"],
            (
                "critic.with_reward=true: is not supported with per-step rewards, which require a"
                " separate reward server"
            ),
        ),
        (
            [
                *("reward.kind=combined", "reward.combine=min"),
                "+reward.sources.a={kind: function, function: 'my:steps', step_rewards: true}",
                "+reward.sources.b={kind: function, function: digit_fraction}",
            ],
            "reward.combine=min: is not supported with step rewards",
        ),
        (
            [
                "reward.kind=combined",
                "+reward.sources.a={kind: model, path: somewhere, step_separator: 3}",
            ],
            "reward.sources.a.step_separator=3: expected a string, got int",
        ),
        (
            [
                "reward.kind=combined",
                "+reward.sources.a={kind: function, function: 'my:f', step_rewards: 1}",
            ],
            "reward.sources.a.step_rewards=1: must be true or false",
        ),
    ],
)
def test_invalid_step_reward_keys_are_refused(given, message):
    with pytest.raises(ConfigError) as caught:
        check(compose_config(["experiment=tiny_ppo", *given]))
    assert message in str(caught.value)
