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
from aligner.training.partial_rollouts import Straggler, from_saved, prompt_fields, to_saved
from aligner.training.rollout_builder import RolloutBatch, RolloutBuilder
from aligner.training.services import PendingRows, Services, together

Drawn = TypeVar("Drawn")

_TENSORS = "rollouts.safetensors"
_PROMPTS = "rollouts.json"


def _thread(name: str) -> Executor:
    return ThreadPoolExecutor(1, thread_name_prefix=name)


@dataclass(frozen=True)
class _Progress:
    """Position of the generation in the stream, from which a batch or a resumed run continues."""

    position: int = 0
    """Number of prompts taken from the stream."""
    under_way: tuple[Straggler, ...] = ()
    """Prompts that were carried over."""


@dataclass(frozen=True)
class _Batch:
    """A batch whose generation was submitted."""

    step: int
    """Training step that consumes the batch."""
    drawn: Future[tuple[RolloutBatch, _Progress]]
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
    on timing. With `interrupts`, a separate thread publishes each version as soon as it is
    available, also during the generation of a batch.

    Neither side can get far ahead of the other: the generator has work for at most `steps_ahead`
    steps, and the trainer waits when it takes a batch that is not complete. With `max_staleness` 0
    a batch is generated when it is taken.
    """

    def __init__(
        self,
        rollouts: RolloutBuilder,
        ahead: RolloutBuilder | None,
        weights: WeightPublisher,
        services: Services,
        settings: RolloutConfig,
        steps: int,
        pad_token_id: int,
        *,
        interrupts: bool = False,
        workers: Callable[[str], Executor] = _thread,
    ) -> None:
        """Create the pipeline.

        Args:
            rollouts: Builder that all ranks use together.
            ahead: Builder that rank 0 uses alone; None on other ranks. It is not used if
                `max_staleness` is 0.
            weights: Publisher of the weights; a `RemotePublisher` unless `max_staleness` is 0.
            services: Access to the servers.
            settings: Section `rollout` of the configuration.
            steps: Number of steps of the run; no batch is generated for later steps.
            pad_token_id: Token id that pads the rows of a batch.
            interrupts: Whether weights are published during the generation of a batch.
            workers: Function that creates a named executor, which runs its tasks one after another.
        """
        self._rollouts = rollouts
        self._ahead = ahead
        self._weights = weights
        self._services = services
        self._settings = settings
        self._steps = steps
        self._pad_token_id = pad_token_id
        self._drawing = workers("rollouts") if settings.steps_ahead and ahead else None
        # Without interrupts, one worker alternates between weight syncs and generation.
        self._serving = workers("weights") if self._drawing and interrupts else self._drawing
        self._served: Future[None] | None = None
        """Pending weight sync of the newest version, on rank 0; None after the last version."""
        self._newest = 0
        self._beside: Future[Any] | None = None
        """Pending extra generation with the newest version, on rank 0; the next version is
        published after it."""
        self._batches: deque[_Batch] = deque()
        """Batches in the order of their steps, on rank 0."""
        self._next = 0
        """First step whose batch has not been submitted."""
        self._taken = _Progress()
        """Progress after the batches that were taken."""
        self._held: list[_Batch] = []
        """Batches that belong to the checkpoint that is being saved."""
        self._held_from = _Progress()
        """Progress before those batches."""
        self.pass_rates: PassRates | None = None
        """Pass rates of the prompts after the completed steps, on every rank. A batch uses the pass
        rates from the time at which its weight version was published."""
        self._needed = 0
        """Position of the first prompt that a run resumed from the last checkpoint samples or
        continues, on rank 0."""

    @property
    def is_ahead(self) -> bool:
        """Whether samples are generated ahead of training."""
        return self._settings.steps_ahead > 0

    @property
    def publish_stats(self) -> PublishStats | None:
        """Statistics of the newest weight sync that this rank saw complete."""
        return self._weights.stats

    def publish_weights(self, version: int, last: bool = False) -> None:
        """Publish the trainer's weights, and submit the batches that they admit. Collective.

        If samples are generated ahead of training, the weights are copied before this method
        returns, and published later.

        Args:
            version: Version of the weights.
            last: Whether this is the last version: it admits no batch, and is published only if
                `await_published` waits for it.
        """
        if not self.is_ahead:
            self._weights.publish(version)
            return
        weights = cast(RemotePublisher, self._weights)
        # All ranks copy their weights, because the next step changes them; only rank 0 continues
        # below.
        weights.take_snapshot(version)
        self._served = None
        if self._drawing is None or self._serving is None:
            return

        self._newest = version
        if last:
            return

        served = self._served = self._serving.submit(self._serve, version, self._beside)
        self._beside = None
        # Admission: this version generates all batches up to `steps_ahead` steps ahead of it.
        while self._next <= min(version + self._settings.steps_ahead, self._steps - 1):
            self._batches.append(
                _Batch(self._next, self._drawing.submit(self._draw, served, self.pass_rates))
            )
            self._next += 1

    def draw_beside(self, draw: Callable[[RolloutBuilder], Drawn]) -> Future[Drawn] | None:
        """Submit extra generation with the newest version on rank 0; return None on the other
        ranks.

        It runs after the batches that were submitted, and before a newer version is published. Call
        this at most once per version, and only if samples are generated ahead of training.
        """
        if self._drawing is None or self._ahead is None:
            return None
        served = self._served
        ahead = self._ahead
        assert served is not None and self._beside is None, (
            "the engine must have the newest weight version and no other extra samples in flight"
        )

        def drawn() -> Drawn:
            served.result()
            return draw(ahead)

        self._beside = self._drawing.submit(drawn)
        return self._beside

    def await_published(self) -> None:
        """Wait until the engine has the newest weights. Collective.

        Raises:
            AlignerError: The weight sync failed; raised on every rank.
        """

        def wait() -> None:
            if self._serving is not None:
                serving = self._served or self._serving.submit(
                    cast(RemotePublisher, self._weights).serve, self._newest
                )
                serving.result()

        if self.is_ahead:
            together(wait)

    def take(self) -> RolloutBatch:
        """Return the batch of the next step, equal on every rank. Collective.

        Raises:
            AlignerError: Generation failed; raised on every rank.
        """
        if not self.is_ahead:
            rollout = self._rollouts.take(self.pass_rates)
            self._taken = _Progress(self._rollouts.position)
            return rollout
        rollouts: list[RolloutBatch] = []

        def take() -> None:
            if self._ahead is not None:
                batch_rollout, self._taken = self._batches.popleft().drawn.result()
                rollouts.append(batch_rollout)

        together(take)
        return self._shared(rollouts[0] if rollouts else None)

    def close(self) -> None:
        """Stop the threads, and close the engine. Collective."""

        def end() -> None:
            for worker in (self._drawing, self._serving):
                if worker is not None:
                    worker.shutdown(cancel_futures=True)

        together(end)  # their current tasks may need the other ranks
        self._rollouts.close()

    def begin_save(self, step: int) -> None:
        """Select the batches that a checkpoint of `step` must contain.

        These are the batches of the following steps that older weights than the checkpoint's
        generate; batches of the newest weights can be generated again. The previous checkpoint must
        be complete.
        """
        # The previous checkpoint is complete, so no run resumes from before its position.
        self._rollouts.forget(self._needed)
        self._held = [
            batch for batch in self._batches if batch.step < step + self._settings.steps_ahead
        ]
        self._held_from = self._taken

    def finish_save(self, directory: Path) -> int:
        """Write the batches of the checkpoint on rank 0, after they are generated. Collective.

        Returns:
            The number of prompts taken from the stream by then.

        Raises:
            AlignerError: Generation failed; raised on every rank.
        """
        position = together(lambda: self._write(directory))
        if not self.is_ahead:
            self._needed = position
        return position

    def resume(self, directory: Path, step: int, position: int) -> None:
        """Restore the batches in the checkpoint of `step`, if any, and the position in the stream.
        Collective.

        Raises:
            AlignerError: The batches were generated further ahead than `rollout.max_staleness`
                allows.
        """
        self._rollouts.position = position
        self._taken = _Progress(position)
        self._next = step
        if self._ahead is not None:
            self._ahead.position = position
        together(lambda: self._read(directory, step))

    def _serve(self, version: int, beside: Future[Any] | None) -> None:
        """Publish a version after the extra generation of the previous version.

        An error of the extra generation is ignored here, because its caller receives it.
        """
        if beside is not None:
            # The weight sync must follow this generation, even if it failed.
            with suppress(Exception):
                beside.result()
        cast(RemotePublisher, self._weights).serve(version)

    def _draw(
        self, served: Future[None], rates: PassRates | None
    ) -> tuple[RolloutBatch, _Progress]:
        """Generate a batch with the weights that the engine has at that time, or newer weights."""
        assert self._ahead is not None, "only rank 0 generates"
        served.result()
        return self._ahead.take(rates), _Progress(self._ahead.position, self._ahead.under_way)

    def _write(self, directory: Path) -> int:
        """Write the batches of the checkpoint, and return the position in the stream after them."""
        rollouts = []
        progress = self._held_from
        for batch in self._held:
            rollout, progress = batch.drawn.result()
            rollouts.append(rollout)
        self._held = []
        # Episodes of earlier prompts are never started again, so their journal can be deleted.
        self._needed = min(
            (straggler.prompt.id for straggler in progress.under_way), default=progress.position
        )
        if not rollouts and not progress.under_way:
            return progress.position

        tensors: dict[str, Tensor] = {}
        for index, rollout in enumerate(rollouts):
            tensors |= {f"{index}.{name}": tensor for name, tensor in _to_tensors(rollout).items()}
        straggler_tensors, under_way = to_saved(progress.under_way)
        tensors |= {f"under_way.{name}": tensor for name, tensor in straggler_tensors.items()}

        batches = [
            _to_json(rollout) | {"replaced": to_saved(rollout.replaced)[1]} for rollout in rollouts
        ]
        with fenced_write():
            directory.mkdir(parents=True, exist_ok=True)
            write_file(directory / _TENSORS, to_bytes(tensors))
            write_file(
                directory / _PROMPTS, json.dumps({"batches": batches, "under_way": under_way})
            )
        return progress.position

    def _read(self, directory: Path, step: int) -> None:
        """Restore the batches of the checkpoint on the ranks that generate."""
        is_another_ranks = self.is_ahead and self._ahead is None
        if is_another_ranks or not (directory / _PROMPTS).exists():
            return
        try:
            saved = json.loads((directory / _PROMPTS).read_text())
            tensors = load_file(directory / _TENSORS)
            batches = saved["batches"]
            under_way = from_saved(_part(tensors, "under_way"), saved["under_way"])
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

        self._next = step + len(batches)
        # The batch of step `self._next` is the first that continues the partial rollouts.
        oldest = min(
            (version for straggler in under_way for version in straggler.first_versions),
            default=step,
        )
        if self._next - oldest > allowed:
            raise AlignerError(
                f"{key}={allowed}: the checkpoint contains partial rollouts of weight version"
                f" {oldest}, and step {self._next} trains on these rollouts; resume with"
                f" {key}={self._next - oldest} or more"
            )

        if self._ahead is not None:
            self._ahead.under_way = under_way
        self._taken = replace(self._taken, under_way=under_way)
        for index, batch in enumerate(batches):
            rollout = self._from_saved(_part(tensors, f"{index}"), batch)
            completed: Future[tuple[RolloutBatch, _Progress]] = Future()
            completed.set_result(
                (rollout, self._taken)
            )  # all batches were complete when they were saved
            self._batches.append(_Batch(step + index, completed))

    def _shared(self, drawn: RolloutBatch | None) -> RolloutBatch:
        """Return rank 0's batch on every rank, and request its values from the critic."""
        message = (
            None
            if drawn is None
            else (_to_json(drawn), _places(drawn.scores), _places(drawn.teacher_logprobs))
        )
        # JSON carries the small fields; samples are broadcast as tensors, and only rank 0 has the
        # futures.
        fields, rows, teacher_rows = broadcast_json(message)

        samples = broadcast_samples(None if drawn is None else drawn.samples)
        futures, environment_rewards = (
            ((), None) if drawn is None else (drawn.scores.futures, drawn.scores.added)
        )
        rollout = self._from_json(
            fields,
            samples,
            PendingRows(
                futures, torch.tensor(rows), environment_rewards, self._rollouts.score_parts
            ),
        )

        teacher_futures = () if drawn is None else drawn.teacher_logprobs.futures
        teacher_logprobs = PendingRows(
            teacher_futures,
            None if teacher_rows is None else torch.tensor(teacher_rows),
        )

        values = PendingRows(self._services.ask_values(rollout.batch))
        replaced = () if drawn is None else drawn.replaced
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
            "left_out": tuple(fields["left_out"]),
        }
        return RolloutBatch(prompts, samples, batch, scores, PendingRows(()), **counts)

    def _from_saved(self, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> RolloutBatch:
        """Return the batch from the results of `_to_tensors` and `_to_json`."""
        samples = samples_from_tensors(tensors)
        scores = PendingRows(
            (_answered(tensors["scores"]),), tensors["rows"], sources=self._rollouts.score_parts
        )
        rollout = self._from_json(fields, samples, scores)
        if (teacher_logprobs := tensors.get("teacher_logprobs")) is not None:
            rollout = replace(rollout, teacher_logprobs=PendingRows((_answered(teacher_logprobs),)))
        replaced = (
            from_saved(_part(tensors, "replaced"), fields["replaced"])
            if "replaced" in fields
            else ()
        )
        return replace(rollout, replaced=replaced)


def _answered(rows: Tensor) -> Future[Tensor]:
    """Return a completed future."""
    answer: Future[Tensor] = Future()
    answer.set_result(rows)
    return answer


def _places(pending: PendingRows) -> list[int] | None:
    """Return the indices of the batch's samples among all generated samples; None for all."""
    return None if pending.chosen is None else pending.chosen.tolist()


def _to_json(drawn: RolloutBatch) -> dict[str, Any]:
    prompts = [prompt_fields(prompt) for prompt in drawn.prompts]
    return {
        "prompts": prompts,
        "deferred": drawn.deferred,
        "skipped": drawn.skipped,
        "left_out": drawn.left_out,
    }


def _to_tensors(drawn: RolloutBatch) -> dict[str, Tensor]:
    teacher_tensors: dict[str, Tensor] = {}
    # Save them: a repeated request in another batch could round them differently.
    if drawn.teacher_logprobs.futures:
        teacher_tensors["teacher_logprobs"] = drawn.teacher_logprobs.local(
            drawn.batch.tokens.shape[1] - 1
        ).contiguous()
    return {
        **teacher_tensors,
        **samples_to_tensors(drawn.samples),
        "scores": drawn.all_scores.local(),
        "rows": torch.tensor(_places(drawn.scores)),
        **{f"replaced.{name}": tensor for name, tensor in to_saved(drawn.replaced)[0].items()},
    }


def _part(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `name.`, by the rest of their names."""
    return {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{name}.")
    }
