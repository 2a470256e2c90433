"""The policy's weights into the engine after every update."""

import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from aligner.errors import AlignerError
from aligner.resharding.encodings import Changes
from aligner.resharding.link import Link
from aligner.resharding.transfer_plan import TransferPlan
from aligner.resharding.transport import (
    Encoding,
    Exchange,
    Read,
    ReadOnce,
    Step,
    copy_local,
    rows_of,
    slice_shape,
    steps,
)
from aligner.resharding.verify import verify
from aligner.resharding.weight_update import PublishStats, WeightFormat, WeightUpdate
from aligner.schema import EngineConfig


class Publisher:
    """Takes the trainer's weights into the engine, on all ranks or on none.

    Every rank of the link calls `publish`. Pieces are written beside or over the engine's weights,
    as its update has it; only when all ranks have theirs does the engine's version change.
    """

    def __init__(
        self,
        plan: TransferPlan,
        link: Link,
        *,
        read: Read | None,
        begin_update: Callable[[int], WeightUpdate] | None,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int,
        verify_every: int,
        group_bytes: int | None = None,
        copied: Container[str] = (),
        travels: str = "whole",
        before: Read | None = None,
    ) -> None:
        """`read` gives this rank's source slices and is None on a rank that has none;
        `begin_update(version)` opens the update of this rank's engine and is None on a rank without
        one.

        Pieces travel as `dtype`, which the engine's views have too. `group_bytes`, the same on
        every rank: most bytes of tensors that the engine takes at a time; None where all its views
        exist at once. `copied` names the tensors of which `read` gives a copy, not the trainer's
        own memory: they are staged, and one such copy lives at a time.

        `travels` is `engine.publish`. With "changes" `before` gives what `read` gave at the publish
        before, in the travelling dtype, and the engine's views hold what that wrote. Raises
        AlignerError when these do not fit the plan or the link.
        """
        rank, problems = link.rank, []
        if plan.source.get(rank) and read is None:
            problems.append(
                "the transfer plan requires this rank to send weights, but it has no weights"
            )
        if plan.target.get(rank) and begin_update is None:
            problems.append(
                "the transfer plan requires this rank to receive weights, but it has no engine"
            )
        if len(plan.labels) != link.size:
            problems.append(
                f"the transfer plan has {len(plan.labels)} ranks, but the link has"
                f" {link.size} ranks"
            )
        if dtype.itemsize != plan.itemsize:
            problems.append(
                f"{dtype} has {dtype.itemsize} bytes per element, but the transfer plan requires"
                f" {plan.itemsize} bytes"
            )
        if problems:
            raise AlignerError(f"{link.labels[rank]}: " + "; ".join(problems))
        self._travels, self._before = travels, before or _no_source
        self.stats: PublishStats | None = None
        """Of the last publish."""
        self._plan, self._link, self._dtype = plan, link, dtype
        self._read = read or _no_source
        self._copied, self._begin_update = copied, begin_update
        self._group_bytes, self._verify_every = group_bytes, verify_every
        self._groups = [
            (group, steps(group, rank, bucket_bytes)) for group in plan.groups(group_bytes)
        ]
        self._count = 0

    @classmethod
    def to_engine(
        cls,
        plan: TransferPlan,
        link: Link,
        settings: EngineConfig,
        to: WeightFormat,
        *,
        read: Read | None = None,
        begin_update: Callable[[int], WeightUpdate] | None = None,
        copied: Container[str] = (),
        before: Read | None = None,
    ) -> "Publisher":
        """To an engine of these settings, in the format that it takes."""
        return cls(
            plan,
            link,
            read=read,
            begin_update=begin_update,
            dtype=to.dtype,
            bucket_bytes=settings.bucket_mib << 20,
            verify_every=settings.verify_every,
            group_bytes=to.group_bytes,
            copied=copied,
            travels=settings.publish,
            before=before,
        )

    @torch.no_grad()
    def publish(self, version: int) -> PublishStats:
        """Publish the weights as `version`; verified at the first call and at every
        `verify_every`-th after it.

        Raises AlignerError on every rank, naming the ranks where something failed and what it was,
        and those that did not answer; the link is broken then. Unless the failure was in the last
        step, an engine's taking what it had received, every engine has aborted its update; in that
        step only those have that failed in it.
        """
        begin = time.perf_counter()
        verifies = self._count == 0 or (
            self._verify_every > 0 and self._count % self._verify_every == 0
        )
        self._count += 1
        failure = (
            f"weight version {version} was not synced to the engine; the engine aborts its update"
        )
        update: WeightUpdate | None = None
        staging, verify_seconds, read = 0, 0.0, ReadOnce(self._read)
        compares = self._travels == "changes" and self.stats is not None
        moved = changed = 0
        with ExitStack() as undo:
            for group, order in self._groups:
                names = list(group.target.get(self._link.rank, ()))
                with self._link.agreement(failure):
                    if update is None and self._begin_update is not None:
                        update = self._begin_update(version)
                        undo.callback(update.abort)
                    views = {} if update is None else update.views(names)
                    self._check(group, views)
                with self._link.agreement(failure):
                    encoding = self._encoding(group, order, read, compares=compares)
                    copy_local(group, self._link.rank, read, views)
                    exchange = Exchange(
                        group, self._link, self._dtype, read, views, self._copied, encoding
                    )
                    staging = max(staging, exchange.run(order))
                    moved, changed = moved + exchange.sent_bytes, changed + (encoding.changed or 0)
                    if verifies:
                        start = time.perf_counter()
                        verify(group, self._link, self._dtype, read, views)
                        verify_seconds += time.perf_counter() - start
                    if self._group_bytes is None and update is not None:
                        update.load(names)
                if self._group_bytes is not None:
                    # ranks of an engine may load together: all of them have to come
                    with self._link.agreement(failure):
                        if update is not None:
                            update.load(names)
            with self._link.agreement(
                f"weight version {version} may be loaded on only some of the engine ranks"
            ):
                of_all = torch.tensor([moved, changed], device=self._link.device)
                self._link.all_reduce(of_all)
                if update is not None:
                    update.commit()
                undo.pop_all()
        whole = sum(
            transfer.numel
            for transfer in self._plan.transfers
            if transfer.source != transfer.target
        )
        moved, changed = of_all.tolist()
        self.stats = PublishStats(
            staging_bytes=staging,
            seconds=time.perf_counter() - begin,
            verify_seconds=verify_seconds if verifies else None,
            moved_bytes=moved,
            whole_bytes=whole * self._dtype.itemsize,
            changed=changed / whole if compares and whole else None,
        )
        return self.stats

    def give_up(self, store: Store) -> None:
        """Have the publish under way fail on every rank, as `Link.give_up` has it."""
        self._link.give_up(store)

    def _encoding(
        self, plan: TransferPlan, order: Sequence[Step], read: Read, *, compares: bool
    ) -> Encoding:
        """Return the encoding of this publish's pieces. Collective.

        Args:
            compares: Whether the engines still hold the weights that `before` gives.
        """
        if compares:
            before = ReadOnce(self._before)
            return Changes.agreed(
                order,
                self._link,
                self._dtype,
                lambda piece: rows_of(plan, piece, read),
                lambda piece: rows_of(plan, piece, before),
            )
        return Encoding(self._dtype)

    def _check(self, plan: TransferPlan, views: Mapping[str, Tensor]) -> None:
        """Raise an error that names every tensor whose view is missing or is not as the plan
        says."""
        problems = []
        for name, wanted in plan.target.get(self._link.rank, {}).items():
            shape = slice_shape(plan.specs[name], wanted)
            if name not in views:
                problems.append(f"{name}: the engine has no such tensor")
            elif tuple(views[name].shape) != shape or views[name].dtype != self._dtype:
                has = f"{tuple(views[name].shape)} of {views[name].dtype}"
                problems.append(
                    f"{name}: the engine's tensor is {has}, the transfer plan writes {shape} of"
                    f" {self._dtype}"
                )
        if problems:
            raise AlignerError(
                "the engine does not match the transfer plan:\n" + "\n".join(problems)
            )


def _no_source(name: str) -> Tensor:
    raise AlignerError(f"{name}: this rank has no weights to read")
