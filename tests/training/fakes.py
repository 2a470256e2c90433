"""Fake prompts, engines and servers for tests of the order of events."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import replace

import torch

from aligner.data.types import Completion, Prompt, Sample
from aligner.engines.engine_protocol import GenerationCounts
from tests.agents.scripted import Scripted


class Stream:
    """A prompt stream in which a prompt's id is its position."""

    def take(self, start, count):
        ids = range(start, start + count)
        return [Prompt(id, f"prompt {id}", torch.tensor([5]), {"task": f"task {id}"}) for id in ids]

    def select(self, start, count, rates):
        """Take prompts whose metadata contain the pass rates that selected them."""
        drawn = [
            replace(prompt, metadata={**prompt.metadata, "rates": rates})
            for prompt in self.take(start, count)
        ]
        return drawn, start + count


class Digits:
    """An engine whose responses are the tokens 10 + prompt id and 10 + sample index, with the
    served weight version."""

    def __init__(self, spend=lambda: None):
        """Generate the second token after `spend` returns."""
        self.version, self.spend = 0, spend
        self.first = 0

    def drop_journal_before(self, first):
        self.first = max(self.first, first)

    def sample(self, samples, samples_per_prompt, options, early_stop=None):
        first = self.version
        assert all(sample.prompt_id >= self.first for sample in samples), (
            "what is needed again is not forgotten"
        )
        self.spend()
        return [
            Sample(
                sample.prompt_id,
                sample.sample_index,
                torch.tensor([5, 10 + sample.prompt_id, 10 + sample.sample_index]),
                1,
                torch.zeros(2),
                torch.tensor([first, self.version]),
                "stop",
            )
            for sample in samples
        ]

    def end_generation(self):
        return GenerationCounts()

    def take_environment_wait_s(self):
        return None

    def close(self):
        pass


class Writer(Scripted):
    """An engine whose responses have random lengths; the token at position t is 10 + t."""

    def __init__(self, seed):
        super().__init__(says=lambda turn, tokens: [])
        self.seed = seed
        self._writing = {}

    def length(self, prompt_id, index):
        return random.Random(f"{self.seed} {prompt_id} {index}").choice((1, 3, 5, 9, 40))

    @property
    def has_work(self):
        return bool(self._arrivals or self._writing)

    def step(self):
        self._writing |= {request: [] for request in self._take_arrivals()}
        for request, versions in list(self._writing.items()):
            versions.append(self.version)
            key = request.key
            written = len(request.tokens) - key.stream_start + len(versions)
            if written == self.length(key.prompt_id, key.sample_index):
                self._deliver(request, "stop")

    def interrupt(self):
        self._writing |= {request: [] for request in self._take_arrivals()}
        for request in list(self._writing):
            self._deliver(request, "interrupted")

    def _deliver(self, request, reason):
        versions = self._writing.pop(request)
        begin = 10 + len(request.tokens) - request.key.stream_start
        tokens = torch.arange(begin, begin + len(versions))
        versions = torch.tensor(versions, dtype=torch.int64)
        request.resolve(Completion(tokens, torch.zeros(len(tokens)), versions, reason))


def _now(answer):
    done: Future = Future()
    done.set_result(answer)
    return done


def teacher_logprobs(batch):
    """Return the teacher's log-probs [B, S-1]: minus the token id, 0 in the padding."""
    inside = torch.arange(1, batch.tokens.shape[1]) < batch.lengths[:, None]
    return torch.where(inside, -batch.tokens[:, 1:].float(), 0.0)


class Scorers:
    """The servers; samples of a prompt get different scores if `is_mixed(prompt id)` is true."""

    def __init__(self, is_mixed, answer=None):
        """Set `answer`, which returns an answer's future; by default, answers are immediate."""
        self.is_mixed, self.answer = is_mixed, answer or _now

    def request_scores(self, batch, metadata, retry_batch_rows=None):
        ids, index = batch.tokens[:, 1] - 10, batch.tokens[:, 2] - 10
        scores = [
            float(self.is_mixed(i) and int(k) == 1)
            for i, k in zip(ids.tolist(), index, strict=True)
        ]
        return (self.answer(torch.tensor(scores)),)

    def request_values(self, batch):
        return ()

    def request_teacher_logprobs(self, batch, metadata):
        return (self.answer(teacher_logprobs(batch)),)

    def request_scores_and_values(self, batch, metadata, retry_batch_rows=None):
        return self.request_scores(batch, metadata), ()
