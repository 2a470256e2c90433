"""The turns of an agent's episode as samples: each token that was drawn is in one of them, as
drawn."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from aligner.data.types import Prompt, Sample
from aligner.engines.engine_loop import (
    unfinished_sample,
    with_completion,
    with_observation,
)
from aligner.engines.engine_protocol import GenerationRequest
from aligner.environments.agent_session import AgentTurn


def episode_sample(
    request: GenerationRequest, turns: Sequence[AgentTurn], reward: float, *, is_cut: bool
) -> Sample | None:
    """An episode's sample, with what does not belong to its main sequence as branches; None where
    there were no turns.

    A turn goes on from the one whose tokens, read and drawn, are the longest that it begins with.
    Of several that go on from one turn the one with the most turns behind it stays in its sequence;
    what the others have read is their prompt. The main sequence is the one with the most turns, and
    of these the longest. So nothing hangs on the order of the turns. The reward is given for the
    main sequence's last token.
    """
    if not turns:
        return None
    sequences = sorted(
        _sequences(turns), key=lambda each: (-len(each), -len(_end(each[-1])), _end(each[-1]))
    )
    main, *others = [_sample(request, each) for each in sequences]
    rewards = torch.zeros(len(main.response))
    rewards[-1] = reward
    reason = "length" if is_cut else main.finish_reason
    return replace(main, finish_reason=reason, rewards=rewards, branches=tuple(others))


def _sequences(turns: Sequence[AgentTurn]) -> list[list[AgentTurn]]:
    """The turns in rows, of which each goes on from the one before it."""
    ordered = sorted(turns, key=lambda turn: (-len(_end(turn)), _end(turn), -len(turn.read)))
    ends = [_end(turn) for turn in ordered]
    following: dict[int, list[list[AgentTurn]]] = {}
    """What goes on from a turn, by its place; -1: from none."""
    for place, turn in enumerate(ordered):  # a turn comes after all that go on from it
        behind = sorted(following.pop(place, []), key=len)
        longest = behind.pop() if behind else []
        read = turn.read.numpy().tobytes()
        before = next(
            (at for at in range(place + 1, len(ordered)) if read.startswith(ends[at])), -1
        )
        following.setdefault(before, []).append([turn, *longest])
        following.setdefault(-1, []).extend(behind)
    return following[-1]


def _sample(request: GenerationRequest, turns: Sequence[AgentTurn]) -> Sample:
    """Return the sequence of turns that continue each other as one sample."""
    prompt = Prompt(request.prompt.id, "", turns[0].read, request.prompt.metadata)
    sample = unfinished_sample(GenerationRequest(prompt, request.sample_index))
    for turn in turns:
        observation = turn.read[len(sample.tokens) :].tolist()
        sample = with_observation(sample, observation, limit=len(turn.read) + 1)
        sample = with_completion(sample, replace(turn.response, routes=None))
    return sample


def _end(turn: AgentTurn) -> bytes:
    """All that was read and drawn, as bytes."""
    return turn.read.numpy().tobytes() + turn.drawn.numpy().tobytes()
