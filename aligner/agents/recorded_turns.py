"""Turns of an interrupted agent episode (partial rollout), which the agent receives again.

An episode that was interrupted starts its agent again. `RecordedTurns` answers the requests that
the agent repeats with the tokens that were generated before, so that only new turns, and the rest
of an incomplete turn, are generated. A partial sample contains the turns as its sequences.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aligner.data.stop_strings import StopSearch
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Completion, CompletionReason, Sample, SamplingSupport
from aligner.engines.engine_loop import (
    append_completion,
    append_observation,
    create_unfinished_sample,
)
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions


@dataclass(frozen=True)
class RecordedTurn:
    """Input and generated tokens of a request of an agent. The turn may be incomplete."""

    input_tokens: Tensor
    """int64 [T]"""
    repeats: int
    """Number of earlier requests of the episode with the same input."""
    completion: Completion

    @property
    def key(self) -> tuple[bytes, int]:
        """Identity of the request in its episode."""
        return self.input_tokens.numpy().tobytes(), self.repeats


class RecordedTurns:
    """Turns of an episode, by the input tokens of their request and its repetition."""

    def __init__(self, turns: Iterable[RecordedTurn] = ()) -> None:
        self._turns = {turn.key: turn for turn in turns}

    @classmethod
    def from_sample(cls, sample: Sample | None) -> "RecordedTurns":
        """Return the turns of a partial sample from `build_partial_sample`; None has no turns."""
        if sample is None:
            return cls()
        turns: list[RecordedTurn] = []
        counts = Counter[bytes]()
        for sequence in sample.sequences:
            for start, end in _find_turns(sequence):
                input_tokens = sequence.tokens[: sequence.prompt_length + start]
                input_bytes = input_tokens.numpy().tobytes()
                support = sequence.sampling_support
                grammar = next(
                    (span.grammar for span in sequence.grammar_spans if span.start == start), None
                )
                completion = Completion(
                    tokens=sequence.response[start:end],
                    logprobs=sequence.engine_logprobs[start:end],
                    weight_versions=sequence.weight_versions[start:end],
                    finish_reason="interrupted",
                    sampling_support=None if support is None else support.select(slice(start, end)),
                    grammar=grammar,
                    grammar_start=len(input_tokens),
                )
                turns.append(RecordedTurn(input_tokens, counts[input_bytes], completion))
                counts[input_bytes] += 1
        return cls(turns)

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[RecordedTurn]:
        return iter(self._turns.values())

    def add(self, turn: RecordedTurn) -> None:
        """Record a turn; it replaces an earlier turn of the same request."""
        self._turns[turn.key] = turn

    def pop(self, input_tokens: Tensor, repeats: int) -> Completion | None:
        """Remove the turn of a request, and return its tokens; None if it is not recorded."""
        turn = self._turns.pop((input_tokens.numpy().tobytes(), repeats), None)
        return None if turn is None else turn.completion


def build_partial_sample(request: GenerationRequest, turns: RecordedTurns) -> Sample:
    """Return an unfinished sample that contains the turns.

    A turn whose input begins with another turn's input and completion continues the sequence of
    that turn. Each repetition of a request is a sequence of its own, and these sequences are in the
    order of the repetitions. `RecordedTurns.from_sample` restores the turns.
    """
    recorded = _select_restorable(turns)
    if not recorded:
        return create_unfinished_sample(replace(request, partial_sample=None))

    # The longest inputs come last, so that a turn comes after all turns that it continues.
    sequences: list[list[RecordedTurn]] = []
    for turn in sorted(recorded, key=lambda turn: (turn.repeats, len(turn.input_tokens))):
        sequence = None if turn.repeats else _find_continued(sequences, turn)
        if sequence is None:
            sequences.append([turn])
        else:
            sequence.append(turn)

    *branches, last = [_build_sequence(request, sequence) for sequence in sequences]
    sample = replace(
        last,
        finish_reason="unfinished",
        # Only the sample itself may be unfinished, and nothing reads this field of the branches.
        branches=tuple(replace(branch, finish_reason="length") for branch in branches),
    )
    return sample.with_data_prompt(request.prompt.tokens)


def cut_at_stop(
    completion: Completion, input_tokens: Tensor, sampling: SamplingOptions, tokenizer: Tokenizer
) -> Completion:
    """Return a recorded completion up to the end that a request's sampling parameters set.

    The finish reason is `interrupted` if the recorded tokens end before.
    """
    search = None
    if sampling.stop:
        search_start = len(input_tokens) + sampling.min_new_tokens
        search = StopSearch(tokenizer, sampling.stop, input_tokens.tolist(), search_start)
    reason: CompletionReason = "interrupted"
    count = 0
    while reason == "interrupted" and count < len(completion.tokens):
        token = int(completion.tokens[count])
        count += 1
        ends_string = search is not None and search.find_end([token]) is not None
        ends_turn = token in sampling.stop_token_ids and count > sampling.min_new_tokens
        if ends_string or ends_turn:
            reason = "stop"
        elif count == sampling.max_new_tokens:
            reason = "length"
    support = completion.sampling_support
    return replace(
        completion,
        tokens=completion.tokens[:count],
        logprobs=completion.logprobs[:count],
        weight_versions=completion.weight_versions[:count],
        finish_reason=reason,
        sampling_support=None if support is None else support.select(slice(count)),
    )


def has_grammar(completion: Completion, grammar: str | None) -> bool:
    """Return whether a recorded completion follows a grammar; None: whether it follows none."""
    recorded = None if completion.grammar is None else completion.grammar.text
    return recorded == grammar


def join_completions(first: Completion, second: Completion) -> Completion:
    """Return a completion of which the generation was interrupted after `first`."""
    supports = (first.sampling_support, second.sampling_support)
    support = None
    if any(part is not None for part in supports):
        parts = [
            part or SamplingSupport.unrestricted(len(completion.tokens))
            for part, completion in zip(supports, (first, second), strict=True)
        ]
        ids = [ids for part in parts for ids in part.split_ids()]
        support = SamplingSupport.from_counts(
            torch.cat([part.counts for part in parts]), torch.cat(ids)
        )
    return Completion(
        tokens=torch.cat([first.tokens, second.tokens]),
        logprobs=torch.cat([first.logprobs, second.logprobs]),
        weight_versions=torch.cat([first.weight_versions, second.weight_versions]),
        finish_reason=second.finish_reason,
        sampling_support=support,
        grammar=second.grammar,
        grammar_start=second.grammar_start,
    )


def _select_restorable(turns: RecordedTurns) -> list[RecordedTurn]:
    """Return the turns that have tokens, and whose earlier repetitions have tokens too.

    A partial sample contains repetitions by their order, so that none may be missing.
    """
    selected = []
    next_repeats = Counter[bytes]()
    for turn in sorted(turns, key=lambda turn: turn.repeats):
        input_bytes, repeats = turn.key
        if len(turn.completion.tokens) and repeats == next_repeats[input_bytes]:
            next_repeats[input_bytes] += 1
            selected.append(turn)
    return selected


def _find_continued(
    sequences: Sequence[list[RecordedTurn]], turn: RecordedTurn
) -> list[RecordedTurn] | None:
    """Return the sequence whose last turn the input of `turn` continues; None if there is none.

    The input must have at least one token after that turn, which separates the two turns.
    """
    for sequence in sequences:
        last = sequence[-1]
        tokens = torch.cat([last.input_tokens, last.completion.tokens])
        is_longer = len(turn.input_tokens) > len(tokens)
        if is_longer and torch.equal(turn.input_tokens[: len(tokens)], tokens):
            return sequence
    return None


def _build_sequence(request: GenerationRequest, turns: Sequence[RecordedTurn]) -> Sample:
    """Return turns, each of which continues the previous one, as one sample."""
    prompt = replace(request.prompt, text="", tokens=turns[0].input_tokens)
    sample = create_unfinished_sample(GenerationRequest(prompt, request.sample_index))
    for turn in turns:
        observation = turn.input_tokens[len(sample.tokens) :].tolist()
        # The engine has accepted this input, so the limit must not reject it again.
        sample = append_observation(sample, observation, limit=len(turn.input_tokens) + 1)
        sample = append_completion(sample, replace(turn.completion, expert_routing=None))
    return sample


def _find_turns(sequence: Sample) -> list[tuple[int, int]]:
    """Return the start and the end of each run of generated tokens in the response."""
    spans = []
    start = 0
    turns = sequence.split_turns()
    for index, tokens in enumerate(turns):
        end = start + len(tokens)
        # The turns at even indices are generated; the first one may be empty.
        if index % 2 == 0 and len(tokens):
            spans.append((start, end))
        start = end
    return spans
