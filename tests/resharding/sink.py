"""The receiving side of an engine for tests: the served weights, and the weights of an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from aligner.errors import AlignerError
from aligner.resharding.transfer_plan import TransferPlan
from aligner.resharding.transport import slice_shape


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
