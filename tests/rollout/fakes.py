"""What stands for the prompts, the engine and the servers where only the order of things is looked at."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from aligner.data.types import Prompt, Sample


class Stream:
    """A prompt's id is its position."""

    def take(self, start, count):
        return [Prompt(start + place, f"prompt {start + place}", torch.tensor([5])) for place in range(count)]


class Digits:
    """Whose responses say which prompt and sample they are, 10 + prompt and 10 + index, drawn by the weights that serve."""

    def __init__(self):
        self.version = 0

    def sample(self, prompts, samples_per_prompt, options):
        return [
            Sample(
                prompt.id,
                index,
                torch.tensor([5, 10 + prompt.id, 10 + index]),
                1,
                torch.zeros(2),
                torch.full((2,), self.version),
                "stop",
            )
            for prompt in prompts
            for index in range(samples_per_prompt)
        ]

    def rest(self):
        pass

    def close(self):
        pass


class Scorers:
    """Servers that answer at once: a prompt whose id `is_mixed` gets different scores for its samples."""

    def __init__(self, is_mixed):
        self.is_mixed = is_mixed

    def ask_scores(self, tokens, lengths, prompt_lengths, metadata):
        ids, index = tokens[:, 1] - 10, tokens[:, 2] - 10
        score: Future = Future()
        score.set_result(
            torch.tensor([float(self.is_mixed(i) and int(k) == 1) for i, k in zip(ids.tolist(), index, strict=True)])
        )
        return (score,)

    def ask_values(self, tokens, lengths):
        return ()

    def ask(self, tokens, lengths, prompt_lengths, metadata):
        return self.ask_scores(tokens, lengths, prompt_lengths, metadata), ()
