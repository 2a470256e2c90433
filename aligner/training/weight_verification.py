"""Verification of weight syncs by the probe: the engine's log-probs equal the trainer's.

`PolicyProbe` computes the trainer's log-probs and compares the engine's with them.
`VerifyingPublisher` is the publisher of an engine on the trainer's ranks.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from aligner.data.collectives import gather_json
from aligner.engines.engine_protocol import GenerationEngine, SpanListener
from aligner.engines.weight_probe import (
    ProbeResult,
    ProbeTolerance,
    build_run_probe,
    find_probe_problem,
    run_probe,
)
from aligner.errors import AlignerError
from aligner.megatron.policy import Policy
from aligner.resharding.publisher import Publisher
from aligner.resharding.weight_update import PublishStats, WeightFormat
from aligner.schema import Config


class PolicyProbe:
    """The probe of a run's policy; see `WeightProbe`."""

    def __init__(self, config: Config, policy: Policy, engine_format: WeightFormat) -> None:
        """Create the probe.

        Args:
            config: Configuration of the run.
            policy: This rank's part of the policy.
            engine_format: Format of the engine's weights.
        """
        self._policy = policy
        shape = policy.runner.shape
        self.sequences = build_run_probe(config, shape)
        """Token ids of the probe, int64 [4, T]."""
        trainer_precision = config.actor.precision
        if trainer_precision == "auto":
            trainer_precision = "bf16" if policy.world.device.type == "cuda" else "fp32"
        engine_precision = "bf16" if engine_format.dtype == torch.bfloat16 else "fp32"
        self._tolerance = ProbeTolerance.for_precisions(
            (trainer_precision, engine_precision), shape
        )

    def compute(self) -> Tensor:
        """Return the policy's log-probs, float32 [4, T-1]; see `WeightProbe.compute`."""
        return self._compute_logprobs(self.sequences)

    def check(self, version: int, trainer_logprobs: Tensor, results: Sequence[Any]) -> float:
        """Return the maximum difference of the engine's log-probs; see `WeightProbe.check`."""
        replica_results = [ProbeResult(**values) for values in results]
        return self._compare(version, replica_results, [trainer_logprobs] * len(results))

    def compute_and_check(self, version: int, results: Sequence[Any]) -> float:
        """Compute the policy's log-probs of the tokens of each result, and return the maximum
        difference of the engine's log-probs. Collective.

        Raises:
            AlignerError: On every rank, if the log-probs of a replica differ by more than rounding.
        """
        replica_results = [ProbeResult(**values) for values in results]
        # Engines that score given tokens all score the same ones.
        logprobs_by_tokens: dict[str, Tensor] = {}
        trainer_logprobs = []
        for result in replica_results:
            key = str(result.tokens)
            if result.error is None and key not in logprobs_by_tokens:
                logprobs_by_tokens[key] = self._compute_logprobs(torch.tensor(result.tokens))
            trainer_logprobs.append(logprobs_by_tokens.get(key, torch.zeros(0)))
        return self._compare(version, replica_results, trainer_logprobs)

    def _compute_logprobs(self, sequences: Tensor) -> Tensor:
        """Return the policy's log-probs of all tokens after the first one, float32 [4, T-1]."""
        count, length = sequences.shape
        return self._policy.logprobs(sequences, torch.full((count,), length), temperature=1.0)

    def _compare(
        self, version: int, results: Sequence[ProbeResult], trainer_logprobs: Sequence[Tensor]
    ) -> float:
        """Return the maximum difference of the log-probs of all replicas.

        Args:
            version: Version of the weights, for the error message.
            results: Result of each replica.
            trainer_logprobs: The trainer's log-probs of each replica's tokens, [4, T-1].

        Raises:
            AlignerError: The log-probs of a replica differ by more than rounding.
        """
        difference = 0.0
        problems = []
        for replica, (result, logprobs) in enumerate(zip(results, trainer_logprobs, strict=True)):
            # An engine that generates tokens has only the log-probs of these last ones.
            expected = logprobs
            if result.error is None:
                expected = logprobs[:, -len(result.logprobs[0]) :]
            problem = find_probe_problem(result, expected, self._tolerance)
            if problem is not None:
                problems.append(f"engine replica {replica}: {problem}")
            else:
                differences = (torch.tensor(result.logprobs) - expected).abs()
                difference = max(difference, float(differences.max()))
        if problems:
            raise AlignerError(
                f"with weight version {version}, the engine does not compute the trainer's"
                " log-probs:\n" + "\n".join(problems)
            )
        return difference


class VerifyingPublisher:
    """`WeightPublisher` to an engine on the trainer's ranks, which verifies weight syncs by the
    probe."""

    def __init__(
        self,
        publisher: Publisher,
        engine: GenerationEngine,
        probe: PolicyProbe | None,
        config: Config,
        listener: SpanListener | None = None,
    ) -> None:
        """Create the publisher of one rank.

        Args:
            publisher: Publisher to the engine.
            engine: This rank's part of the engine.
            probe: Probe of the policy; None with `engine.verify=never`.
            config: Configuration of the run.
            listener: Called with `probe` after each probe, and its start and end in seconds of
                `time.perf_counter`.
        """
        self._publisher = publisher
        self._engine = engine
        self._probe = probe
        self._verify = config.engine.verify
        self._replica_ranks = config.engine.parallel.replica_ranks
        self._listener = listener
        self._probe_stats: tuple[float, float] | None = None
        """Duration in seconds and maximum difference of the last probe."""

    @property
    def stats(self) -> PublishStats | None:
        """See `WeightPublisher.stats`."""
        stats = self._publisher.stats
        if stats is None or self._probe_stats is None:
            return stats
        seconds, difference = self._probe_stats
        return replace(stats, probe_seconds=seconds, probe_logprob_abs=difference)

    def publish(self, version: int) -> None:
        """See `WeightPublisher.publish`."""
        is_first = self._publisher.stats is None
        self._publisher.publish(version)
        self._probe_stats = None
        if self._probe is not None and (is_first or self._verify == "sync"):
            start = time.perf_counter()
            difference = self._run_probe(self._probe, version)
            end = time.perf_counter()
            self._probe_stats = (end - start, difference)
            if self._listener is not None:
                self._listener("probe", start, end)

    def _run_probe(self, probe: PolicyProbe, version: int) -> float:
        """Compute the probe in engine and trainer, and return their maximum difference. Collective.

        Raises:
            AlignerError: On every rank, if the log-probs of a replica differ.
        """
        # Every rank gets the results of all replicas, so that all ranks raise the same error.
        results = gather_json(asdict(run_probe(self._engine, probe.sequences)))
        return probe.compute_and_check(version, results[:: self._replica_ranks])
