"""The weight probe: log-probs of fixed sequences, which the engine and the trainer compute with the
same weights (`engine.verify`).

Checksums show that the engine holds the trainer's weights. The probe shows that the engine also
computes with them what the trainer computes. It covers weights that the engine cannot read back,
such as the packed matrices of vLLM on CPUs.

The probe has several short sequences instead of a long one: in a mixture of experts, rounding
sometimes routes a token to another expert, which changes the log-probs of its sequence.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from aligner.engines.engine_protocol import GenerationEngine, RequestKey, SamplingOptions
from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.schema import Config
from aligner.schema.derived import get_max_sequence_length

_SEQUENCES = 4
_LENGTH = 16
"""Maximum number of tokens of a sequence."""
_GENERATED = 4
"""Number of tokens of a sequence that an engine generates if it cannot score given tokens."""

_TOLERANCES = {"fp32": 1e-3, "bf16": 0.5, "fp8": 1.0}
"""Maximum difference of two log-probs in nats, by precision. docs/engine.md derives the values."""


@dataclass(frozen=True)
class ProbeTolerance:
    """Maximum difference of the log-probs of engine and trainer."""

    nats: float
    uses_median: bool
    """Whether the tolerance applies to the median of all positions instead of their maximum.

    With fewer than 32 bits, the rounding errors of single positions have a long tail. In a mixture
    of experts, rounding can route a token to another expert.
    """

    @classmethod
    def for_precisions(cls, precisions: Sequence[str], shape: ModelShape) -> "ProbeTolerance":
        """Return the tolerance for the precisions of engine and trainer: fp32, bf16 or fp8."""
        nats = max(_TOLERANCES[precision] for precision in precisions)
        has_low_precision = any(precision != "fp32" for precision in precisions)
        return cls(nats, has_low_precision or shape.num_experts > 0)


@dataclass(frozen=True)
class ProbeResult:
    """Log-probs of a replica, or the error of its engine."""

    tokens: list[list[int]]
    """Token ids of each sequence."""
    logprobs: list[list[float]]
    """Log-probs of the last tokens of each sequence, equally many of each."""
    error: str | None = None


def build_probe(shape: ModelShape, max_sequence_length: int, seed: int) -> Tensor:
    """Return the token ids of the probe's sequences, int64 [4, T], which depend on the size of the
    vocabulary and on the seed.

    Args:
        shape: Dimensions of the model.
        max_sequence_length: Maximum number of tokens of a sequence in the engine.
        seed: Seed of the run.
    """
    # vLLM generates one token after the scored ones. The first token of a sequence has no log-prob.
    longest = max(2, min(max_sequence_length, shape.max_positions) - 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocab_size, (_SEQUENCES, min(_LENGTH, longest)), generator=generator)


def build_run_probe(config: Config, shape: ModelShape) -> Tensor:
    """Return the probe of a run's model; see `build_probe`."""
    return build_probe(shape, get_max_sequence_length(config), config.seed)


def run_probe(engine: GenerationEngine, sequences: Tensor) -> ProbeResult:
    """Compute the log-probs of the probe with an engine, at temperature 1.

    An engine that cannot score given tokens generates the last tokens of each sequence, and returns
    their log-probs. Collective over the ranks of a replica. An error is part of the result, so that
    the caller can take part in the collectives that follow.
    """
    if not engine.is_leader:
        engine.follow()
        return ProbeResult(**engine.end_turn())
    compute = _score_sequences if engine.can_score else _continue_sequences
    try:
        result = compute(engine, sequences)
    except AlignerError as error:
        result = ProbeResult([], [], str(error))
    return ProbeResult(**engine.end_turn(asdict(result)))


def _score_sequences(engine: GenerationEngine, sequences: Tensor) -> ProbeResult:
    """Return the log-probs of all tokens after the first one."""
    requests = [engine.submit_scoring(row) for row in sequences]
    _step_until_done(engine, [request.future for request in requests], "submit_scoring")
    logprobs = [request.future.result(0).logprobs.tolist() for request in requests]
    return ProbeResult(sequences.tolist(), logprobs)


def _continue_sequences(engine: GenerationEngine, sequences: Tensor) -> ProbeResult:
    """Let the engine generate the last tokens of the sequences, and return their log-probs."""
    count = min(_GENERATED, sequences.shape[1] - 1)
    sampling = SamplingOptions(max_new_tokens=count, min_new_tokens=count)
    prompts = sequences[:, :-count]
    requests = [
        engine.submit(row, sampling, RequestKey(0, index, len(row)))
        for index, row in enumerate(prompts)
    ]
    _step_until_done(engine, [request.future for request in requests], "submit")
    completions = [request.future.result(0) for request in requests]
    tokens = [
        [*row.tolist(), *completion.tokens.tolist()]
        for row, completion in zip(prompts, completions, strict=True)
    ]
    return ProbeResult(tokens, [completion.logprobs.tolist() for completion in completions])


def _step_until_done(engine: GenerationEngine, futures: Sequence[Future[Any]], method: str) -> None:
    """Run the engine until requests are answered.

    Raises AlignerError if the engine has no work any more before.
    """
    while not all(future.done() for future in futures):
        if not engine.has_work:
            raise AlignerError(
                f"{type(engine).__name__} has no work left, but did not answer the requests of"
                f" `{method}`, which engine.verify requires; an engine that cannot score given"
                " tokens must set `can_score = False`"
            )
        engine.step()


def find_probe_problem(
    result: ProbeResult, trainer_logprobs: Tensor, tolerance: ProbeTolerance
) -> str | None:
    """Return how the log-probs of an engine differ from the trainer's by more than the tolerance;
    None if they do not.

    Args:
        result: Result of the engine.
        trainer_logprobs: Log-probs of the trainer for the same tokens, float32 [4, L].
        tolerance: Maximum difference.
    """
    if result.error is not None:
        return result.error
    engine_logprobs = torch.tensor(result.logprobs)
    # NaN is not below any tolerance, and must be the worst position.
    differences = (engine_logprobs - trainer_logprobs).abs().nan_to_num(math.inf, math.inf)
    maximum = float(differences.max())
    median = float(differences.median())
    # A single position with NaN is wrong, whatever the others are.
    uses_median = tolerance.uses_median and math.isfinite(maximum)
    if (median if uses_median else maximum) <= tolerance.nats:
        return None
    sequence, index = divmod(int(differences.argmax()), differences.shape[1])
    tokens = result.tokens[sequence]
    position = len(tokens) - differences.shape[1] + index
    problem = (
        f"position {position} of probe sequence {sequence} (token {tokens[position]}): the log-prob"
        f" of the engine is {float(engine_logprobs[sequence, index]):.6g}, that of the trainer is"
        f" {float(trainer_logprobs[sequence, index]):.6g}"
    )
    if uses_median:
        problem += f"; the median difference of all positions is {median:.3g}"
    return f"{problem}; the tolerance is {tolerance.nats:g}"
