"""The conversations of agents' episodes, for output as chat messages.

A sample contains tokens only. `AgentTranscripts` collects the messages of the agents' requests, and
returns them by the sequences of a sample.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aligner.data.chat_turns import ChatTurns
from aligner.data.conversations import build_conversation, build_turn_conversation
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt, Sample
from aligner.engines.engine_protocol import GenerationRequest

if TYPE_CHECKING:
    # the endpoint requires the extra `agents`
    from aligner.agents.agent_endpoint import AgentTurn


class AgentTranscripts:
    """The turns of complete episodes, until `take_conversations` returns their messages."""

    def __init__(self) -> None:
        self._turns: dict[tuple[int, int], Sequence[AgentTurn]] = {}
        """Turns of an episode, by prompt id and sample index."""

    def record(self, request: GenerationRequest, turns: Sequence["AgentTurn"]) -> None:
        """Store the turns of an episode that has ended."""
        self._turns[request.prompt.id, request.sample_index] = turns

    def take_conversations(
        self, sample: Sample, tokenizer: Tokenizer, get_chat_turns: Callable[[], ChatTurns]
    ) -> list[dict[str, Any]]:
        """Return the messages of each sequence of an episode, and forget the episode.

        The messages of a sequence are those of its last request, followed by the policy's answer. A
        sequence of text completions has its prompt as the message of a user; the policy's turns and
        the texts between them alternate.

        Args:
            sample: The sample of the episode.
            tokenizer: Tokenizer of the policy.
            get_chat_turns: Function that returns the policy's chat format; called only if the agent
                has requested chat completions.
        """
        turns = self._turns.pop((sample.prompt_id, sample.sample_index))
        conversations = []
        for sequence in sample.sequences:
            last_turn = next(
                turn for turn in turns if torch.equal(_get_tokens(turn), sequence.tokens)
            )
            if last_turn.conversation is not None:
                conversations.append(
                    build_turn_conversation(
                        last_turn.conversation,
                        last_turn.generated_tokens,
                        tokenizer,
                        get_chat_turns(),
                    )
                )
            else:
                prompt_tokens = sequence.tokens[: sequence.prompt_length]
                prompt_text = tokenizer.decode(prompt_tokens)
                prompt = Prompt(sequence.prompt_id, prompt_text, prompt_tokens)
                conversations.append(
                    build_conversation(sequence, prompt, [], tokenizer, get_chat_turns)
                )
        return conversations


def _get_tokens(turn: "AgentTurn") -> Tensor:
    """Return input and generated tokens of a turn, int64 [T]."""
    return torch.cat([turn.input_tokens, turn.generated_tokens])
