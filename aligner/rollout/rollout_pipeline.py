"""Generation beside training: the next steps' samples are drawn while this one's are learned
from."""

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
from aligner.rollout.rollout_builder import RolloutBatch, RolloutBuilder
from aligner.rollout.services import PendingRows, Services, together
from aligner.rollout.stragglers import Straggler, from_saved, prompt_fields, to_saved
from aligner.schema import RolloutConfig

Drawn = TypeVar("Drawn")

_TENSORS, _PROMPTS = "rollouts.safetensors", "rollouts.json"


def _thread(name: str) -> Executor:
    return ThreadPoolExecutor(1, thread_name_prefix=name)


@dataclass(frozen=True)
class _Progress:
    """Where drawing has come to: what a batch, or what was saved with a checkpoint, goes on
    from."""

    position: int = 0
    """Prompts taken from the stream."""
    under_way: tuple[Straggler, ...] = ()
    """Those of them that were left behind."""


@dataclass(frozen=True)
class _Batch:
    """A batch that has been begun."""

    step: int
    """That is to train on it."""
    drawn: Future[tuple[RolloutBatch, _Progress]]
    """And where drawing has come to with it."""


class RolloutPipeline:
    """Each step's rollout, drawn up to `max_staleness` steps ahead of it.

    Invariant: a batch that is trained at version v, by the step that makes version v + 1 of it,
    holds no sample admitted at a version below v - `max_staleness`. It is kept by admission: batch
    b is begun when version b - `steps_ahead` serves, and no earlier, where `steps_ahead` is
    `max_staleness` less the times that a prompt may be left behind; nothing is discarded.

    The trainer never waits for a publish: it keeps a copy of its weights, and one thread of rank 0
    has them served and the batches drawn, one after another: version v, then the batch that it
    admits, then version v + 1. So a batch is drawn to its end by one version, that of its
    admission: what draws a sample follows from the step alone, not from what takes how long. With
    `interrupts` versions are served by a thread of their own, as soon as they are there, also in
    the middle of a batch.

    Neither side runs away: the generator has work for `steps_ahead` steps at most, and the trainer
    waits when it takes a batch that is not drawn. With `max_staleness` 0 a batch is drawn when it
    is taken.
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
        """`rollouts` is every rank's; `ahead` is rank 0's alone, and is not used where
        `max_staleness` is 0; elsewhere `weights` is a `RemotePublisher`.

        No batch of a step from `steps` on is begun. `workers` makes what does one thing after
        another beside the caller.
        """
        self._rollouts, self._ahead, self._weights, self._services = (
            rollouts,
            ahead,
            weights,
            services,
        )
        self._settings, self._steps, self._pad_token_id = settings, steps, pad_token_id
        self._drawing = workers("rollouts") if settings.steps_ahead and ahead else None
        self._serving = workers("weights") if self._drawing and interrupts else self._drawing
        self._served: Future[None] | None = None
        """The newest version's, on rank 0; None where that was the last one."""
        self._newest = 0
        self._beside: Future[Any] | None = None
        """What is drawn by the newest version beside the batches, on rank 0: the next version
        serves after it."""
        self._batches: deque[_Batch] = deque()
        """Rank 0's, in the order of their steps."""
        self._next = 0
        """The first step whose batch has not been begun."""
        self._taken = _Progress()
        """Where the batches that were taken have come to."""
        self._held: list[_Batch] = []
        """What the checkpoint that was begun holds."""
        self._held_from = _Progress()
        """Where the batches before them had come to."""
        self.pass_rates: PassRates | None = None
        """Of the prompts, of the steps that are done: a version's batch is drawn by those at its
        publish. Every rank's."""
        self._needed = 0
        """The first prompt that who goes on from the last checkpoint draws, on rank 0, or is in the
        middle of."""

    @property
    def is_ahead(self) -> bool:
        """Whether samples are drawn before their step."""
        return self._settings.steps_ahead > 0

    @property
    def publish_stats(self) -> PublishStats | None:
        """Of the newest publish that this rank has seen the end of."""
        return self._weights.stats

    def publish_weights(self, version: int, last: bool = False) -> None:
        """The trainer's weights are `version` now: have them served, and begin the batches that
        they may draw.

        Every rank calls it. The `last` version begins none, and is served only if it is awaited.
        Where batches are drawn ahead, the weights are copied by the time this returns, and served
        later.
        """
        if not self.is_ahead:
            self._weights.publish(version)
            return
        weights = cast(RemotePublisher, self._weights)
        weights.take_snapshot(version)
        self._served = None
        if self._drawing is None or self._serving is None:
            return
        self._newest = version
        if last:
            return
        served = self._served = self._serving.submit(self._serve, version, self._beside)
        self._beside = None
        while self._next <= min(version + self._settings.steps_ahead, self._steps - 1):
            self._batches.append(
                _Batch(self._next, self._drawing.submit(self._draw, served, self.pass_rates))
            )
            self._next += 1

    def draw_beside(self, draw: Callable[[RolloutBuilder], Drawn]) -> Future[Drawn] | None:
        """Have rank 0 draw by the newest version, behind the batches that it has begun and before a
        newer one serves.

        Once for each version, where batches are drawn ahead. None on the other ranks.
        """
        if self._drawing is None or self._ahead is None:
            return None
        served, ahead = self._served, self._ahead
        assert served is not None and self._beside is None, (
            "the engine must have the newest weight version and no other extra samples in flight"
        )

        def drawn() -> Drawn:
            served.result()
            return draw(ahead)

        self._beside = self._drawing.submit(drawn)
        return self._beside

    def await_published(self) -> None:
        """Return once the newest weights serve. Collective; raises AlignerError on every rank."""

        def wait() -> None:
            if self._serving is not None:
                serving = self._served or self._serving.submit(
                    cast(RemotePublisher, self._weights).serve, self._newest
                )
                serving.result()

        if self.is_ahead:
            together(wait)

    def take(self) -> RolloutBatch:
        """The next step's batch, equal on every rank. Collective; raises AlignerError on every
        rank."""
        if not self.is_ahead:
            rollout = self._rollouts.take(self.pass_rates)
            self._taken = _Progress(self._rollouts.position)
            return rollout
        taken: list[RolloutBatch] = []

        def take() -> None:
            if self._ahead is not None:
                drawn, self._taken = self._batches.popleft().drawn.result()
                taken.append(drawn)

        together(take)
        return self._shared(taken[0] if taken else None)

    def close(self) -> None:
        """End the threads, and the engine. Collective."""

        def end() -> None:
            for worker in (self._drawing, self._serving):
                if worker is not None:
                    worker.shutdown(cancel_futures=True)

        together(end)  # what they are at may need the other ranks
        self._rollouts.close()

    def begin_save(self, step: int) -> None:
        """A checkpoint of `step` holds the batches of the steps from there on that older weights
        than `step`'s draw.

        What the newest weights draw can be drawn again. The checkpoint before it is complete.
        """
        self._rollouts.forget(self._needed)
        self._held = [
            batch for batch in self._batches if batch.step < step + self._settings.steps_ahead
        ]
        self._held_from = self._taken

    def finish_save(self, directory: Path) -> int:
        """Write the batches, once they are drawn; rank 0 does.

        Gives the prompts taken from the stream by then. Collective; raises AlignerError on every
        rank.
        """
        position = together(lambda: self._write(directory))
        if not self.is_ahead:
            self._needed = position
        return position

    def resume(self, directory: Path, step: int, position: int) -> None:
        """Go on with what was saved for `step`, if anything, and the prompts from `position` on.
        Collective.

        Raises AlignerError when that was drawn further ahead than `rollout.max_staleness` allows.
        """
        self._rollouts.position, self._taken, self._next = position, _Progress(position), step
        if self._ahead is not None:
            self._ahead.position = position
        together(lambda: self._read(directory, step))

    def _serve(self, version: int, beside: Future[Any] | None) -> None:
        """Have a version served, once what the one before it was to draw is drawn; whoever asked
        for that sees its error."""
        if beside is not None:
            with suppress(Exception):
                beside.result()
        cast(RemotePublisher, self._weights).serve(version)

    def _draw(
        self, served: Future[None], rates: PassRates | None
    ) -> tuple[RolloutBatch, _Progress]:
        """A batch by the weights that serve then, or later ones."""
        assert self._ahead is not None, "only rank 0 generates"
        served.result()
        return self._ahead.take(rates), _Progress(self._ahead.position, self._ahead.under_way)

    def _write(self, directory: Path) -> int:
        held, progress = [], self._held_from
        for batch in self._held:
            drawn, progress = batch.drawn.result()
            held.append(drawn)
        self._held = []
        self._needed = min((one.prompt.id for one in progress.under_way), default=progress.position)
        if not held and not progress.under_way:
            return progress.position
        tensors: dict[str, Tensor] = {}
        for place, drawn in enumerate(held):
            tensors |= {f"{place}.{name}": tensor for name, tensor in _to_tensors(drawn).items()}
        left, under_way = to_saved(progress.under_way)
        tensors |= {f"under_way.{name}": tensor for name, tensor in left.items()}
        batches = [_to_json(drawn) | {"replaced": to_saved(drawn.replaced)[1]} for drawn in held]
        with fenced_write():
            directory.mkdir(parents=True, exist_ok=True)
            write_file(directory / _TENSORS, to_bytes(tensors))
            write_file(
                directory / _PROMPTS, json.dumps({"batches": batches, "under_way": under_way})
            )
        return progress.position

    def _read(self, directory: Path, step: int) -> None:
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
        key, allowed = "rollout.max_staleness", self._settings.max_staleness
        if excess > 0:
            raise AlignerError(
                f"{key}={allowed}: the checkpoint contains {len(batches)} rollout batches that were"
                f" generated ahead of training, {excess} more than allowed; resume with"
                f" {key}={allowed + excess} or more"
            )
        self._next = step + len(batches)
        oldest = min((version for one in under_way for version in one.first_versions), default=step)
        if self._next - oldest > allowed:
            raise AlignerError(
                f"{key}={allowed}: the checkpoint contains partial rollouts of weight version"
                f" {oldest}, and step {self._next} trains on these rollouts; resume with"
                f" {key}={self._next - oldest} or more"
            )
        if self._ahead is not None:
            self._ahead.under_way = under_way
        self._taken = replace(self._taken, under_way=under_way)
        for place, batch in enumerate(batches):
            drawn = self._from_saved(_part(tensors, f"{place}"), batch)
            done: Future[tuple[RolloutBatch, _Progress]] = Future()
            done.set_result((drawn, self._taken))  # all of it was drawn before any of it is taken
            self._batches.append(_Batch(step + place, done))

    def _shared(self, drawn: RolloutBatch | None) -> RolloutBatch:
        """Rank 0's batch on every rank, with the critic's values of it asked for."""
        told = (
            None
            if drawn is None
            else (_to_json(drawn), _places(drawn.scores), _places(drawn.teacher_logprobs))
        )
        fields, rows, assemble_teacher_scores = broadcast_json(told)
        samples = broadcast_samples(None if drawn is None else drawn.samples)
        futures, added = ((), None) if drawn is None else (drawn.scores.futures, drawn.scores.added)
        rollout = self._from_json(
            fields,
            samples,
            PendingRows(futures, torch.tensor(rows), added, self._rollouts.score_parts),
        )
        taught = () if drawn is None else drawn.teacher_logprobs.futures
        teacher_logprobs = PendingRows(
            taught,
            None if assemble_teacher_scores is None else torch.tensor(assemble_teacher_scores),
        )
        values = PendingRows(self._services.ask_values(rollout.batch))
        replaced = () if drawn is None else drawn.replaced
        return replace(rollout, values=values, teacher_logprobs=teacher_logprobs, replaced=replaced)

    def _from_json(
        self, fields: Mapping[str, Any], samples: list[Sample], scores: PendingRows
    ) -> RolloutBatch:
        """What `_to_json` was given, of these samples."""
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
        """The batch that `_to_tensors` and `_to_json` were given."""
        samples = samples_from_tensors(tensors)
        scores = PendingRows(
            (_answered(tensors["scores"]),), tensors["rows"], sources=self._rollouts.score_parts
        )
        rollout = self._from_json(fields, samples, scores)
        if (taught := tensors.get("teacher_logprobs")) is not None:
            rollout = replace(rollout, teacher_logprobs=PendingRows((_answered(taught),)))
        replaced = (
            from_saved(_part(tensors, "replaced"), fields["replaced"])
            if "replaced" in fields
            else ()
        )
        return replace(rollout, replaced=replaced)


def _answered(rows: Tensor) -> Future[Tensor]:
    answer: Future[Tensor] = Future()
    answer.set_result(rows)
    return answer


def _places(pending: PendingRows) -> list[int] | None:
    """Which of everything that was generated and asked about a batch has; None: all."""
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
    taught: dict[str, Tensor] = {}
    # kept, for asked again in other company they would be rounded differently
    if drawn.teacher_logprobs.futures:
        taught["teacher_logprobs"] = drawn.teacher_logprobs.local(
            drawn.batch.tokens.shape[1] - 1
        ).contiguous()
    return {
        **taught,
        **samples_to_tensors(drawn.samples),
        "scores": drawn.all_scores.local(),
        "rows": torch.tensor(_places(drawn.scores)),
        **{f"replaced.{name}": tensor for name, tensor in to_saved(drawn.replaced)[0].items()},
    }


def _part(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, by what follows."""
    return {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{name}.")
    }
