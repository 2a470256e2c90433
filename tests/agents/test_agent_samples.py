"""Conversion of an agent's turns, in any order, to samples with branches."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.agents.agent_endpoint import AgentTurn
from aligner.agents.agent_episodes import build_episode_sample
from aligner.data.types import Completion, Prompt, Sample
from aligner.engines.engine_protocol import GenerationRequest

REQUEST = GenerationRequest(Prompt(3, "", torch.tensor([1]), {"answer": "yes"}), 2)
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=3)


def turn(
    read: list[int], generated: list[int], reason: str = "stop", reward: float = 0.0
) -> AgentTurn:
    logprobs = torch.tensor([-len(read) - 0.5, *(-1000.0 - at for at in range(1, len(generated)))])
    versions = torch.full((len(generated),), 7)
    response = Completion(torch.tensor(generated), logprobs, versions, reason)  # type: ignore[arg-type]
    return AgentTurn(torch.tensor(read), response, None, (), "", reward)


@st.composite
def episodes(draw: st.DrawFn) -> list[AgentTurn]:
    """Generate turns that start a new sequence or continue any earlier turn; two may continue the
    same turn."""
    turns: list[AgentTurn] = []
    for _ in range(draw(st.integers(1, 8))):
        before: list[int] = []
        if turns and draw(st.booleans()):
            parent = draw(st.sampled_from(turns))
            before = [*parent.input_tokens.tolist(), *parent.generated_tokens.tolist()]
        given = draw(TOKENS) if not before else draw(st.lists(st.integers(0, 2), max_size=2))
        reward = draw(st.sampled_from([0.0, 0.25, -2.0]))
        turns.append(turn([*before, *given], draw(TOKENS), reward=reward))
    return turns


Stretch = tuple[list[int], list[int], list[float], list[float]]
"""Preceding tokens of a turn, its tokens, and their log-probs and rewards."""


def stretches(sample: Sample) -> list[Stretch]:
    """Return the turns of a sequence.

    The first log-prob of a turn encodes the number of preceding tokens, which separates adjacent
    turns.
    """
    marks = (
        torch.ones(len(sample.response), dtype=torch.bool)
        if sample.generated_mask is None
        else sample.generated_mask
    )
    rewards = torch.zeros(len(marks)) if sample.rewards is None else sample.rewards
    found: list[Stretch] = []
    for at, (token, logprob, reward) in enumerate(
        zip(
            sample.response.tolist(),
            sample.engine_logprobs.tolist(),
            rewards.tolist(),
            strict=True,
        )
    ):
        if not marks[at]:
            assert reward == 0
            continue
        read = sample.tokens[: sample.prompt_length + at].tolist()
        if logprob == -len(read) - 0.5:  # first token of its turn
            found.append((read, [], [], []))
        found[-1][1].append(token)
        found[-1][2].append(logprob)
        found[-1][3].append(reward)
    return found


@settings(deadline=None)
@given(episodes(), st.randoms())
def test_each_turn_is_in_one_sequence_in_any_order(turns, shuffled):
    sample = build_episode_sample(REQUEST, turns, 0.5, is_truncated=False)
    assert sample is not None and sample.rewards is not None
    assert sample.environment_reward == 0.5 + sum(each.reward for each in turns)
    # the reward of the episode is on the last token of the main sequence
    sample.rewards[-1] -= 0.5
    assert (sample.prompt_id, sample.sample_index, sample.metadata) == (3, 2, {"answer": "yes"})
    parts = sorted(part for each in (sample, *sample.branches) for part in stretches(each))
    expected = [
        (
            each.input_tokens.tolist(),
            each.generated_tokens.tolist(),
            each.response.logprobs.tolist(),
            [*[0.0] * (len(each.generated_tokens) - 1), each.reward],
        )
        for each in turns
    ]
    assert parts == sorted(expected)
    shuffled.shuffle(turns)
    other = build_episode_sample(REQUEST, turns, 0.0, is_truncated=False)
    assert other is not None and len(other.branches) == len(sample.branches)
    for one, same in zip((sample, *sample.branches), (other, *other.branches), strict=True):
        assert torch.equal(one.tokens, same.tokens) and one.prompt_length == same.prompt_length
        assert (one.rewards is None) == (same.rewards is None)
        assert one.rewards is None or torch.equal(one.rewards, same.rewards)


def test_main_sequence_has_most_turns() -> None:
    loop = [turn([1], [2]), turn([1, 2, 0], [2]), turn([1, 2, 0, 2, 0], [2], "length")]
    aside = [turn([1, 2, 1, 1, 1, 1, 1, 1, 1], [0]), turn([0], [1])]
    sample = build_episode_sample(REQUEST, [*aside, *loop], 0.0, is_truncated=False)
    assert (
        sample is not None
        and sample.tokens.tolist() == [1, 2, 0, 2, 0, 2]
        and sample.prompt_length == 1
    )
    assert [each.tokens.tolist() for each in sample.branches] == [
        [1, 2, 1, 1, 1, 1, 1, 1, 1, 0],
        [0, 1],
    ]
    assert sample.finish_reason == "length" and {
        each.finish_reason for each in sample.branches
    } == {"stop"}
    cut = build_episode_sample(REQUEST, aside, 0.0, is_truncated=True)
    assert cut is not None and cut.finish_reason == "length"
    assert build_episode_sample(REQUEST, [], 0.0, is_truncated=False) is None
