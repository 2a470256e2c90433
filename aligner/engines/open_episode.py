"""An episode under way: what the policy has drawn and read in it, and whether another environment
repeats what it was told."""

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aligner.data.chat_turns import ChatTurns, Conversation, Unsafe
from aligner.data.tokenizer import Messages
from aligner.data.types import FinishReason, Sample
from aligner.engines.engine_loop import unfinished_sample
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.errors import AlignerError


@dataclass
class OpenEpisode:
    """An episode that is not over: one sequence after another, of which the last one still
    grows."""

    name: str
    request: GenerationRequest
    begun: Sample | None
    """What the episode goes on from, until its environment has gone through all of it once more."""
    branches: list[Sample] = field(default_factory=list)
    """The sequences before the one that grows."""
    sample: Sample | None = None
    """The sequence as it was at the end of the last turn; None before its first one."""
    turn: Tensor | None = None
    """The last turn's tokens, its end among them."""
    told: int = 0
    """Response tokens up to where that turn ends, or the next one begins."""
    turns: int = 0
    conversation: Conversation | None = None
    """As it was when the policy last had to answer; None where it is no chat's."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """In this sequence, by the response token that each was given for, a turn's last one."""

    @property
    def is_replayed(self) -> bool:
        """Whether the sample that it goes on from has what the environment is about to say."""
        begun = self.begun
        return begun is not None and (
            len(self.branches) < len(begun.branches) or self.told < len(begun.response)
        )

    def worded(self, messages: Messages, chat: ChatTurns) -> list[int] | Unsafe:
        """The tokens of messages that came behind the last turn, or why they cannot be appended to
        it.

        Raises AlignerError where the prompt is none of messages, and where no message can stand
        behind the turn.
        """
        assert self.turn is not None
        if self.conversation is None:
            asked = self.request.prompt.metadata
            self.conversation = chat.begin(
                asked.get("messages", ()), asked.get("tools"), asked.get("chat_template_kwargs")
            )
            if not torch.equal(self.conversation.tokens, self.request.prompt.tokens):
                raise AlignerError(
                    "the environment returned chat messages, but the prompt is plain text; the"
                    " prompt must consist of chat messages"
                )
        begun = len(self.conversation.tokens) + len(self.turn)
        found = chat.go_on(self.conversation, self.turn, messages)
        if isinstance(found, Unsafe):
            return found
        self.conversation = found
        return found.tokens[begun:].tolist()

    def act(self, sample: Sample) -> Tensor:
        """The sequence has had a further turn, whose tokens are returned."""
        self.turn = sample.response[self.told :]
        self.sample, self.turns, self.told = sample, self.turns + 1, len(sample.response)
        return self.turn

    def hear(self, found: list[int] | Unsafe) -> None:
        """The policy is told these tokens, or reads the whole conversation anew in a branch."""
        if isinstance(found, Unsafe):
            self.branches.append(self.complete("stop", branches=()))
            self.sample, self.told, self.rewards, self.conversation = None, 0, [], found.anew
        else:
            self.told += len(found)

    def complete(self, reason: FinishReason, branches: tuple[Sample, ...] | None = None) -> Sample:
        """The sequence up to its last turn, with these branches or all."""
        assert self.sample is not None
        return self._told(replace(self.sample, finish_reason=reason), branches)

    @property
    def begun_sequence(self) -> Sample:
        """The sequence that grows, as far as the continued sample contains it."""
        assert self.begun is not None
        return replace(self.begun.sequences[len(self.branches)], branches=(), rewards=None)

    def unfinished(self) -> Sample:
        """Return the episode as it is, for a later step to continue."""
        if self.begun is not None:
            return self.begun
        sample = self.sample or unfinished_sample(replace(self.request, begun=None))
        return self._told(replace(sample, finish_reason="unfinished"), None)

    def repeats(self, found: list[int] | Unsafe) -> bool:
        """Whether the sample that it goes on from has the same there, and the same rewards
        before."""
        assert self.begun is not None
        begun, *following = self.begun.sequences[len(self.branches) :]
        had = torch.zeros(len(begun.response)) if begun.rewards is None else begun.rewards
        if not torch.equal(had[: self.told], self._rewards(self.told)):
            return False
        is_at_end = self.told == len(begun.response)
        if isinstance(found, Unsafe):
            following = following if is_at_end else []
            return any(
                torch.equal(found.anew.tokens, each.tokens[: each.prompt_length])
                for each in following[:1]
            )
        given = itertools.takewhile(
            lambda at: not is_drawn(begun, at), range(self.told, len(begun.response))
        )
        return (
            not is_at_end
            and found == begun.response[self.told : self.told + len([*given])].tolist()
        )

    def next_turn(self, ends: Collection[int]) -> Sample | None:
        """The sequence up to the end of the turn that follows in the sample that it goes on from;
        None where that has no end.

        `ends` are the tokens that end a turn.
        """
        assert self.begun is not None
        begun, *following = self.begun.sequences[len(self.branches) :]
        last = len(begun.response) if following else None
        places = range(self.told, len(begun.response))
        ended = next(
            (at + 1 for at in places if int(begun.response[at]) in ends and is_drawn(begun, at)),
            last,
        )
        if ended is None:
            return None
        return replace(begun.cut(ended, "stop"), branches=(), rewards=None)

    def _told(self, sample: Sample, branches: tuple[Sample, ...] | None) -> Sample:
        """The sample with what the environment has given, and with these branches or all."""
        rewards = self._rewards(len(sample.response))
        return replace(
            sample, rewards=rewards, branches=tuple(self.branches) if branches is None else branches
        )

    def _rewards(self, tokens: int) -> Tensor:
        """What the environment has given for the sequence, float32 [tokens]."""
        rewards = torch.zeros(tokens)
        for token, reward in self.rewards:
            rewards[token] += reward
        return rewards


def branch_prompt(request: GenerationRequest, read: Tensor, options: SamplingOptions) -> Sample:
    """Return the empty sample of a branch of an episode, which reads `read`, int64 [T].

    A branch has room for input and response within the tokens that the episode's prompt and
    response may have together. Raises AlignerError if that leaves no room.
    """
    most = len(request.prompt.tokens) + request.limit(options)
    if most - len(read) < max(1, options.min_new_tokens):
        raise AlignerError(
            f"the re-rendered conversation has {len(read)} tokens and leaves no room"
            f" for a response; prompt and response together must have at most {most} tokens"
        )
    prompt = replace(request.prompt, text="", tokens=read)
    return unfinished_sample(GenerationRequest(prompt, request.sample_index))


def is_drawn(sample: Sample, at: int) -> bool:
    """Whether the model drew a response token."""
    return sample.drawn is None or bool(sample.drawn[at])
