"""Asynchronous generation: the samples of the next steps are generated while the current step
trains."""

import json
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from aligner.data.collectives import (
    broadcast_json,
    broadcast_samples,
    samples_from_tensors,
    samples_to_tensors,
)
from aligner.data.fencing import fenced_write
from aligner.data.pass_rates import PassRates
from aligner.data.types import Prompt, Sample, collate_episodes
from aligner.errors import AlignerError
from aligner.files import write_file
from aligner.resharding.publisher import RemotePublisher
from aligner.resharding.weight_update import PublishStats, WeightPublisher
from aligner.schema import RolloutConfig
from aligner.training.partial_rollouts import (
    PartialRollout,
    deserialize_partial_rollouts,
    prompt_to_json,
    serialize_partial_rollouts,
)
from aligner.training.rollout_builder import RolloutBatch, RolloutBuilder
from aligner.training.services import PendingRows, Services, run_and_broadcast_result

T = TypeVar("T")

_TENSORS_FILE = "rollouts.safetensors"
_RECORDS_FILE = "rollouts.json"


def _create_thread(name: str) -> Executor:
    return ThreadPoolExecutor(1, thread_name_prefix=name)


@dataclass(frozen=True)
class _Progress:
    """Position of the generation in the stream, from which a batch or a resumed run continues."""

    position: int = 0
    """Number of prompts taken from the stream."""
    partial_rollouts: tuple[PartialRollout, ...] = ()
    """Prompts that were carried over."""


@dataclass(frozen=True)
class _Batch:
    """A batch whose generation was submitted."""

    step: int
    """Training step that consumes the batch."""
    rollout: Future[tuple[RolloutBatch, _Progress]]
    """Pending batch, and the progress after it."""


class RolloutPipeline:
    """Provides the rollout of each step, generated up to `max_staleness` steps ahead of training.

    Invariant: the batch that is trained at version v, in the step that produces version v + 1, has
    no sample that was admitted at a version below v - `max_staleness`. Admission ensures this, so
    that no sample is discarded as too old. The generation of batch b starts when the engine has
    version b - `steps_ahead`, and no earlier; `steps_ahead` is `max_staleness` minus the number of
    times that a prompt may be carried over.

    The trainer never waits for a weight sync. It keeps a copy of its weights, and one thread of
    rank 0 alternates between weight syncs and generation: it publishes version v, generates the
    batches that this version admits, and then publishes version v + 1. One version, that of its
    admission, therefore generates a whole batch: the weights of a sample depend on the step, never
    on timing. With `publishes_during_generation`, a separate thread publishes each version as soon
    as it is available, also during the generation of a batch.

    Neither side can get far ahead of the other: the generator has work for at most `steps_ahead`
    steps, and the trainer waits when it takes a batch that is not complete. With `max_staleness` 0
    a batch is generated when it is taken.
    """

    def __init__(
        self,
        builder: RolloutBuilder,
        ahead_builder: RolloutBuilder | None,
        publisher: WeightPublisher,
        services: Services,
        settings: RolloutConfig,
        steps: int,
        pad_token_id: int,
        *,
        publishes_during_generation: bool = False,
        create_executor: Callable[[str], Executor] = _create_thread,
    ) -> None:
        """Create the pipeline.

        Args:
            builder: Builder that all ranks use together.
            ahead_builder: Builder that rank 0 uses alone; None on other ranks. It is not used if
                `max_staleness` is 0.
            publisher: Publisher of the weights; a `RemotePublisher` unless `max_staleness` is 0.
            services: Access to the servers.
            settings: Section `rollout` of the configuration.
            steps: Number of steps of the run; no batch is generated for later steps.
            pad_token_id: Token id that pads the rows of a batch.
            publishes_during_generation: Whether weights are published during the generation of a
                batch.
            create_executor: Function that creates a named executor, which runs its tasks one after
                another.
        """
        self._builder = builder
        self._ahead_builder = ahead_builder
        self._publisher = publisher
        self._services = services
        self._settings = settings
        self._steps = steps
        self._pad_token_id = pad_token_id
        self._generation_worker: Executor | None = None
        if settings.steps_ahead and ahead_builder:
            self._generation_worker = create_executor("rollouts")
        # Without `publishes_during_generation` both are one worker: its queue makes weight syncs
        # and generation alternate.
        self._publish_worker = self._generation_worker
        if self._generation_worker and publishes_during_generation:
            self._publish_worker = create_executor("weights")
        self._pending_publish: Future[None] | None = None
        """Pending weight sync of the newest version, on rank 0; None after the last version."""
        self._newest_version = 0
        self._extra_generation: Future[Any] | None = None
        """Pending extra generation with the newest version, on rank 0; the next version is
        published after it."""
        self._batches: deque[_Batch] = deque()
        """Batches in the order of their steps, on rank 0."""
        self._next_step = 0
        """First step whose batch has not been submitted."""
        self._progress = _Progress()
        """Progress after the batches that were taken."""
        self._checkpoint_batches: list[_Batch] = []
        """Batches that belong to the checkpoint that is being saved."""
        self._checkpoint_progress = _Progress()
        """Progress before those batches."""
        self.pass_rates: PassRates | None = None
        """Pass rates of the prompts after the completed steps, on every rank. A batch uses the pass
        rates from the time at which its weight version was published."""
        self._first_needed_prompt = 0
        """Position of the first prompt that a run resumed from the last checkpoint samples or
        continues, on rank 0."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether samples are generated ahead of training."""
        return self._settings.steps_ahead > 0

    @property
    def publish_stats(self) -> PublishStats | None:
        """Statistics of the newest weight sync that this rank saw complete."""
        return self._publisher.stats

    def publish_weights(self, version: int, is_last: bool = False) -> None:
        """Publish the trainer's weights, and submit the batches that they admit. Collective.

        If samples are generated ahead of training, the weights are copied before this method
        returns, and published later.

        Args:
            version: Version of the weights.
            is_last: Whether this is the last version: it admits no batch, and is published only if
                `await_published` waits for it.
        """
        if not self.is_asynchronous:
            self._publisher.publish(version)
            return
        publisher = cast(RemotePublisher, self._publisher)
        # All ranks copy their weights, because the next step changes them; only rank 0 continues
        # below.
        publisher.take_snapshot(version)
        self._pending_publish = None
        if self._generation_worker is None or self._publish_worker is None:
            return

        self._newest_version = version
        if is_last:
            return

        published = self._publish_worker.submit(self._publish, version, self._extra_generation)
        self._pending_publish = published
        self._extra_generation = None

        # Admission: this version generates all batches up to `steps_ahead` steps ahead of it.
        last_step = min(version + self._settings.steps_ahead, self._steps - 1)
        while self._next_step <= last_step:
            rollout = self._generation_worker.submit(self._generate, published, self.pass_rates)
            self._batches.append(_Batch(self._next_step, rollout))
            self._next_step += 1

    def generate_extra(self, generate: Callable[[RolloutBuilder], T]) -> Future[T] | None:
        """Submit extra generation with the newest version on rank 0; return None on the other
        ranks.

        It runs after the batches that were submitted, and before a newer version is published. Call
        this at most once per version, and only if samples are generated ahead of training.
        """
        if self._generation_worker is None or self._ahead_builder is None:
            return None
        published = self._pending_publish
        ahead_builder = self._ahead_builder
        assert published is not None and self._extra_generation is None, (
            "the engine must have the newest weight version and no other extra samples in flight"
        )

        def generate_after_publish() -> T:
            published.result()
            return generate(ahead_builder)

        self._extra_generation = self._generation_worker.submit(generate_after_publish)
        return self._extra_generation

    def await_published(self) -> None:
        """Wait until the engine has the newest weights. Collective.

        Raises:
            AlignerError: The weight sync failed; raised on every rank.
        """

        def wait() -> None:
            if self._publish_worker is not None:
                published = self._pending_publish
                # `publish_weights` has copied the last version, but not published it.
                if published is None:
                    publisher = cast(RemotePublisher, self._publisher)
                    published = self._publish_worker.submit(publisher.serve, self._newest_version)
                published.result()

        if self.is_asynchronous:
            run_and_broadcast_result(wait)

    def take(self) -> RolloutBatch:
        """Return the batch of the next step, equal on every rank. Collective.

        Raises:
            AlignerError: Generation failed; raised on every rank.
        """
        if not self.is_asynchronous:
            rollout = self._builder.take(self.pass_rates)
            self._progress = _Progress(self._builder.position)
            return rollout
        rank0_rollouts: list[RolloutBatch] = []

        def wait_for_rollout() -> None:
            if self._ahead_builder is not None:
                rollout, self._progress = self._batches.popleft().rollout.result()
                rank0_rollouts.append(rollout)

        # `run_and_broadcast_result` shares the error, but only JSON results.
        run_and_broadcast_result(wait_for_rollout)
        return self._broadcast(rank0_rollouts[0] if rank0_rollouts else None)

    def close(self) -> None:
        """Stop the threads, and close the engine. Collective."""

        def shut_down() -> None:
            for worker in (self._generation_worker, self._publish_worker):
                if worker is not None:
                    worker.shutdown(cancel_futures=True)

        # The other ranks wait, because the current tasks of the workers may need them.
        run_and_broadcast_result(shut_down)
        self._builder.close()

    def begin_save(self, step: int) -> None:
        """Select the batches that a checkpoint of `step` must contain.

        These are the batches of the following steps that older weights than the checkpoint's
        generate; batches of the newest weights can be generated again. The previous checkpoint must
        be complete.
        """
        # The previous checkpoint is complete, so no run resumes from before its position.
        self._builder.drop_journal_before(self._first_needed_prompt)
        self._checkpoint_batches = [
            batch for batch in self._batches if batch.step < step + self._settings.steps_ahead
        ]
        self._checkpoint_progress = self._progress

    def finish_save(self, directory: Path) -> int:
        """Write the batches of the checkpoint on rank 0, after they are generated. Collective.

        Returns:
            The number of prompts taken from the stream by then.

        Raises:
            AlignerError: Generation failed; raised on every rank.
        """
        position = run_and_broadcast_result(lambda: self._write_batches(directory))
        if not self.is_asynchronous:
            self._first_needed_prompt = position
        return position

    def resume(self, directory: Path, step: int, position: int) -> None:
        """Restore the batches in the checkpoint of `step`, if any, and the position in the stream.
        Collective.

        Raises:
            AlignerError: The batches were generated further ahead than `rollout.max_staleness`
                allows.
        """
        self._builder.position = position
        self._progress = _Progress(position)
        self._next_step = step
        if self._ahead_builder is not None:
            self._ahead_builder.position = position
        run_and_broadcast_result(lambda: self._read_batches(directory, step))

    def _publish(self, version: int, extra_generation: Future[Any] | None) -> None:
        """Publish a version after the extra generation of the previous version.

        An error of the extra generation is ignored here, because its caller receives it.
        """
        if extra_generation is not None:
            # The weight sync must follow this generation, even if it failed.
            with suppress(Exception):
                extra_generation.result()
        cast(RemotePublisher, self._publisher).serve(version)

    def _generate(
        self, published: Future[None], pass_rates: PassRates | None
    ) -> tuple[RolloutBatch, _Progress]:
        """Generate a batch with the weights that the engine has at that time, or newer weights."""
        assert self._ahead_builder is not None, "only rank 0 generates"
        published.result()
        rollout = self._ahead_builder.take(pass_rates)
        # The worker runs one task at a time, so this is the progress directly after the batch.
        progress = _Progress(self._ahead_builder.position, self._ahead_builder.partial_rollouts)
        return rollout, progress

    def _write_batches(self, directory: Path) -> int:
        """Write the batches of the checkpoint, and return the position in the stream after them."""
        rollouts = []
        progress = self._checkpoint_progress
        for batch in self._checkpoint_batches:
            rollout, progress = batch.rollout.result()
            rollouts.append(rollout)
        self._checkpoint_batches = []

        # Episodes of earlier prompts are never started again, so their journal can be deleted.
        self._first_needed_prompt = min(
            (partial_rollout.prompt.id for partial_rollout in progress.partial_rollouts),
            default=progress.position,
        )
        if not rollouts and not progress.partial_rollouts:
            return progress.position

        # One file contains all tensors; a prefix separates the batches and the partial rollouts.
        tensors: dict[str, Tensor] = {}
        for index, rollout in enumerate(rollouts):
            tensors |= {f"{index}.{name}": tensor for name, tensor in _to_tensors(rollout).items()}
        partial_tensors, partial_records = serialize_partial_rollouts(progress.partial_rollouts)
        tensors |= {f"under_way.{name}": tensor for name, tensor in partial_tensors.items()}

        batches = [
            _to_json(rollout) | {"replaced": serialize_partial_rollouts(rollout.replaced)[1]}
            for rollout in rollouts
        ]
        with fenced_write():
            directory.mkdir(parents=True, exist_ok=True)
            write_file(directory / _TENSORS_FILE, to_bytes(tensors))
            write_file(
                directory / _RECORDS_FILE,
                json.dumps({"batches": batches, "under_way": partial_records}),
            )
        return progress.position

    def _read_batches(self, directory: Path, step: int) -> None:
        """Restore the batches of the checkpoint on the ranks that generate."""
        is_generating_rank = self._ahead_builder is not None or not self.is_asynchronous
        if not is_generating_rank or not (directory / _RECORDS_FILE).exists():
            return

        try:
            saved = json.loads((directory / _RECORDS_FILE).read_text())
            tensors = load_file(directory / _TENSORS_FILE)
            batches = saved["batches"]
            partial_rollouts = deserialize_partial_rollouts(
                _select_prefix(tensors, "under_way"), saved["under_way"]
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise AlignerError(
                f"{directory}: cannot read the rollout batches that were generated ahead of"
                f" training: {error!r}"
            ) from error

        excess = len(batches) - self._settings.steps_ahead
        key = "rollout.max_staleness"
        allowed = self._settings.max_staleness
        if excess > 0:
            raise AlignerError(
                f"{key}={allowed}: the checkpoint contains {len(batches)} rollout batches that were"
                f" generated ahead of training, {excess} more than allowed; resume with"
                f" {key}={allowed + excess} or more"
            )

        self._next_step = step + len(batches)
        # The batch of step `self._next_step` is the first that continues the partial rollouts.
        first_versions: list[int] = []
        for partial_rollout in partial_rollouts:
            first_versions += partial_rollout.first_versions
        oldest = min(first_versions, default=step)
        if self._next_step - oldest > allowed:
            raise AlignerError(
                f"{key}={allowed}: the checkpoint contains partial rollouts of weight version"
                f" {oldest}, and step {self._next_step} trains on these rollouts; resume with"
                f" {key}={self._next_step - oldest} or more"
            )

        if self._ahead_builder is not None:
            self._ahead_builder.partial_rollouts = partial_rollouts
        self._progress = replace(self._progress, partial_rollouts=partial_rollouts)
        for index, batch in enumerate(batches):
            rollout = self._deserialize(_select_prefix(tensors, f"{index}"), batch)
            # All batches were complete when they were saved. The checkpoint contains only the
            # progress after the last one; a later checkpoint needs no other.
            completed: Future[tuple[RolloutBatch, _Progress]] = Future()
            completed.set_result((rollout, self._progress))
            self._batches.append(_Batch(step + index, completed))

    def _broadcast(self, rank0_rollout: RolloutBatch | None) -> RolloutBatch:
        """Return rank 0's batch on every rank, and request its values from the critic."""
        message = None
        score_futures: tuple[Future[Tensor], ...] = ()
        teacher_futures: tuple[Future[Tensor], ...] = ()
        environment_rewards = None
        replaced: tuple[PartialRollout, ...] = ()
        if rank0_rollout is not None:
            message = (
                _to_json(rank0_rollout),
                _list_selected_rows(rank0_rollout.scores),
                _list_selected_rows(rank0_rollout.teacher_logprobs),
            )
            score_futures = rank0_rollout.scores.futures
            teacher_futures = rank0_rollout.teacher_logprobs.futures
            environment_rewards = rank0_rollout.scores.added_rewards
            replaced = rank0_rollout.replaced

        # JSON carries the small fields; samples are broadcast as tensors, and only rank 0 has the
        # futures.
        fields, score_rows, teacher_rows = broadcast_json(message)
        samples = broadcast_samples(None if rank0_rollout is None else rank0_rollout.samples)

        scores = PendingRows(
            score_futures, torch.tensor(score_rows), environment_rewards, self._builder.source_count
        )
        rollout = self._from_json(fields, samples, scores)
        teacher_logprobs = PendingRows(
            teacher_futures, None if teacher_rows is None else torch.tensor(teacher_rows)
        )

        # Values are requested only now, so that the critic has the updates of all previous steps.
        values = PendingRows(self._services.request_values(rollout.batch))
        return replace(rollout, values=values, teacher_logprobs=teacher_logprobs, replaced=replaced)

    def _from_json(
        self, fields: Mapping[str, Any], samples: list[Sample], scores: PendingRows
    ) -> RolloutBatch:
        """Return the batch from the fields of `_to_json` and its samples."""
        prompts = [
            Prompt(**prompt, tokens=sample.initial_prompt)
            for prompt, sample in zip(fields["prompts"], samples, strict=True)
        ]
        batch = collate_episodes(samples, self._pad_token_id)
        counts = {
            "deferred": fields["deferred"],
            "skipped": fields["skipped"],
            "removed_lengths": tuple(fields["left_out"]),
            # absent in the checkpoints of earlier versions of aligner
            "episode_metrics": fields.get("episode_metrics", {}),
        }
        return RolloutBatch(prompts, samples, batch, scores, PendingRows(()), **counts)

    def _deserialize(
        self, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]
    ) -> RolloutBatch:
        """Return the batch from the results of `_to_tensors` and `_to_json`."""
        samples = samples_from_tensors(tensors)
        # The stored scores already include the rewards of the environments.
        scores = PendingRows(
            (_completed_future(tensors["scores"]),),
            tensors["rows"],
            source_count=self._builder.source_count,
        )
        rollout = self._from_json(fields, samples, scores)
        if (teacher_logprobs := tensors.get("teacher_logprobs")) is not None:
            rollout = replace(
                rollout, teacher_logprobs=PendingRows((_completed_future(teacher_logprobs),))
            )
        replaced: tuple[PartialRollout, ...] = ()
        if "replaced" in fields:
            replaced = deserialize_partial_rollouts(
                _select_prefix(tensors, "replaced"), fields["replaced"]
            )
        return replace(rollout, replaced=replaced)


def _completed_future(rows: Tensor) -> Future[Tensor]:
    """Return a completed future."""
    future: Future[Tensor] = Future()
    future.set_result(rows)
    return future


def _list_selected_rows(pending: PendingRows) -> list[int] | None:
    """Return the indices of the batch's samples among all generated samples; None for all."""
    return None if pending.selected_rows is None else pending.selected_rows.tolist()


def _to_json(rollout: RolloutBatch) -> dict[str, Any]:
    """Return the prompts and counts of a batch as JSON values, without tensors."""
    prompts = [prompt_to_json(prompt) for prompt in rollout.prompts]
    return {
        "prompts": prompts,
        "deferred": rollout.deferred,
        "skipped": rollout.skipped,
        "left_out": rollout.removed_lengths,
        "episode_metrics": dict(rollout.episode_metrics),
    }


def _to_tensors(rollout: RolloutBatch) -> dict[str, Tensor]:
    """Return the samples, scores and teacher log-probs of a batch as tensors on rank 0."""
    teacher_tensors: dict[str, Tensor] = {}
    # A resumed run must not request them again: in another batch the teacher could round them
    # differently.
    if rollout.teacher_logprobs.futures:
        teacher_tensors["teacher_logprobs"] = rollout.teacher_logprobs.result_on_rank0(
            rollout.batch.tokens.shape[1] - 1
        ).contiguous()
    replaced_tensors, _ = serialize_partial_rollouts(rollout.replaced)
    return {
        **teacher_tensors,
        **samples_to_tensors(rollout.samples),
        # The scores of all generated samples, because the metrics include the replaced prompts.
        "scores": rollout.all_scores.result_on_rank0(),
        "rows": torch.tensor(_list_selected_rows(rollout.scores)),
        **{f"replaced.{name}": tensor for name, tensor in replaced_tensors.items()},
    }


def _select_prefix(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `name.`, by the rest of their names."""
    return {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{name}.")
    }
