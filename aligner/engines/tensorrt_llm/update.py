"""An open update of TensorRT-LLM's weights: whole tensors go through a bucket, and overwrite the old ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from aligner.data.weight_files import assemble
from aligner.errors import AlignerError
from aligner.models.weight_slices import TensorSpec, stored_tensors


class Receiver(Protocol):
    """What an update does to its engine."""

    def together(self, what: str, action: Callable[[], None]) -> None:
        """Do something on every rank of the replica. Raises AlignerError on all of them when it fails on any."""
        ...

    def overwrite(self) -> None:
        """The old weights are about to go."""
        ...

    def hand_over(self, tensors: Mapping[str, Tensor]) -> None:
        """Whole tensors by their names in a file, for every worker."""
        ...

    def finish(self) -> None:
        """All tensors have been handed over."""
        ...

    def close(self) -> None:
        """The update is over, whether or not it was finished."""
        ...


class StreamedUpdate:
    """A `WeightUpdate` that holds no more than one group of tensors."""

    def __init__(
        self,
        receiver: Receiver,
        table: Sequence[TensorSpec],
        *,
        group_bytes: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._receiver, self._device, self._dtype, self._group_bytes = receiver, device, dtype, group_bytes
        self._specs = {spec.name: spec for spec in table}
        self._missing = stored_tensors(table)
        self._views: dict[str, Tensor] = {}
        self._written: dict[str, Tensor] = {}
        self._overwrites = False
        self._open = True

    @property
    def group_bytes(self) -> int | None:
        """Bytes of the bucket."""
        return self._group_bytes

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Whole tensors in the engine's precision, on this rank's device; of those that the model has."""
        self._check_open()
        known = [name for name in names if name in self._specs]
        for name in known:
            self._views[name] = torch.empty(self._specs[name].shape, dtype=self._dtype, device=self._device)
        return {name: self._views[name] for name in known}

    def load(self, names: Sequence[str]) -> None:
        """Hand the tensors over. From the first call on the old weights are gone. Collective over the replica."""
        taken: dict[str, Tensor] = {}
        self._receiver.together("taking weights", lambda: taken.update(self._take(names)))
        if not self._overwrites:
            self._overwrites = True
            self._receiver.overwrite()
        if taken:
            self._receiver.hand_over(taken)

    def commit(self) -> None:
        """Make the weights the engine's. Collective. Raises AlignerError naming tensors that were not loaded."""
        self._receiver.together("ending the update", self._check_complete)
        try:
            self._receiver.finish()
        finally:
            self._end()

    def abort(self) -> None:
        """Give the update up: the engine keeps its weights if nothing has been loaded, and else has none."""
        if self._open:
            self._end()

    def _take(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """The tensors of a file that are whole once these have been written; the rest wait for their other parts."""
        self._check_open()
        if unasked := [name for name in names if name not in self._views]:
            raise AlignerError(f"views of {', '.join(unasked)} were not asked for, or are loaded already")
        self._written |= {name: self._views.pop(name) for name in names}
        complete = {
            stored: specs for stored, specs in self._missing.items() if all(spec.name in self._written for spec in specs)
        }
        parts = [spec for specs in complete.values() for spec in specs]
        tensors = dict(assemble(parts, lambda spec: self._written[spec.name]))
        for spec in parts:
            del self._written[spec.name]
        for stored in complete:
            del self._missing[stored]
        return tensors

    def _check_complete(self) -> None:
        self._check_open()
        if self._missing:
            raise AlignerError(f"the update lacks {len(self._missing)} tensor(s): {', '.join(self._missing)}")

    def _end(self) -> None:
        self._open = False
        self._views.clear()
        self._written.clear()
        self._receiver.close()

    def _check_open(self) -> None:
        if not self._open:
            raise AlignerError("this update is over; begin another one")
