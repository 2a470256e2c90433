"""The receiving side of an engine for tests: the served weights, and the weights of an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from aligner.errors import AlignerError
from aligner.resharding.transfer_plan import TransferPlan
from aligner.resharding.transport import slice_shape
from aligner.resharding.verify import compute_checksums, find_different
from aligner.resharding.weight_update import ExpectedSlice


class Sink:
    """The served weights by name (`front`), and their version."""

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        group_bytes: int | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        keeps: bool = False,
    ) -> None:
        """If `keeps`, the views of an update start as copies of the served weights."""
        slices = plan.target.get(rank, {})
        self.shapes = {name: slice_shape(plan.specs[name], piece) for name, piece in slices.items()}
        self.dtype, self.group_bytes, self.keeps = dtype, group_bytes, keeps
        self.memory: type[dict[str, Tensor]] = dict
        self.before_load: Callable[[], None] = lambda: None
        self.before_commit: Callable[[], None] = lambda: None
        self.front: dict[str, Tensor] = self.empty(self.shapes)
        self.version: int | None = None
        self.aborted = 0
        self.open: SinkUpdate | None = None
        self.discarded = ""
        """Reason of the last `discard_weights`."""
        self._verified: Mapping[str, ExpectedSlice] = {}
        self._verified_version: int | None = None

    def find_wrong_weights(self, expected: Mapping[str, ExpectedSlice]) -> Sequence[str]:
        """Compare `front` with the trainer's checksums."""
        found = compute_checksums(self.front, expected, self.dtype)
        self._verified_version = self.version
        self._verified = {
            name: replace(expected[name], checksum=value) for name, value in found.items()
        }
        return find_different(self.front, expected, self.dtype)

    def find_changed_weights(self) -> Sequence[str]:
        """Compare `front` with its checksums at the last verification."""
        is_verified = self.version is not None and self.version == self._verified_version
        return find_different(self.front, self._verified if is_verified else {}, self.dtype)

    def discard_weights(self, reason: str) -> None:
        """Drop the version."""
        self.version, self.discarded = None, reason

    def begin_update(self, version: int) -> SinkUpdate:
        if self.open is not None:
            raise AlignerError("another update is open")
        self.open = SinkUpdate(self, version)
        return self.open

    def empty(self, names: Sequence[str] | Mapping[str, object]) -> dict[str, Tensor]:
        """Return NaN tensors, so that unwritten elements show; with `keeps`, copies of `front`."""
        if getattr(self, "front", None) and self.keeps:
            return self.memory((name, self.front[name].clone()) for name in names)
        return self.memory(
            (name, torch.full(self.shapes[name], float("nan"), dtype=self.dtype)) for name in names
        )


class SinkUpdate:
    """One update; with `group_bytes`, views exist for one group, from `views` to `load`."""

    def __init__(self, sink: Sink, version: int) -> None:
        self._sink, self._version = sink, version
        self._views: dict[str, Tensor] = {} if sink.group_bytes else sink.empty(sink.shapes)
        self._loaded: dict[str, Tensor] = {}

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        if self._sink.group_bytes:
            assert not self._views, "the group before has not been loaded"
            self._views = self._sink.empty(names)
            held = sum(view.nbytes for view in self._views.values())
            assert len(names) <= 1 or held <= self._sink.group_bytes
        return self._views

    def load(self, names: Sequence[str]) -> None:
        self._sink.before_load()
        self._loaded |= {name: self._views[name].clone() for name in names}
        if self._sink.group_bytes:
            self._views = {}

    def commit(self) -> None:
        self._sink.before_commit()
        assert self._loaded.keys() == self._sink.front.keys()
        self._sink.front, self._sink.version, self._sink.open = self._loaded, self._version, None

    def abort(self) -> None:
        self._sink.aborted += 1
        self._sink.open = None
