"""An open update of TensorRT-LLM's weights: whole tensors go through a bucket, and overwrite the old ones."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from aligner.data.weight_files import assemble
from aligner.engines.tensorrt_llm.generation import Replica
from aligner.errors import AlignerError
from aligner.models.weight_slices import TensorSpec, stored_tensors
from aligner.resharding.weight_update import WeightFormat


@dataclass(frozen=True)
class UpdateSteps:
    """What an update does to its engine."""

    overwrite: Callable[[], None]
    """The old weights are about to go."""
    hand_over: Callable[[Mapping[str, Tensor]], None]
    """Whole tensors by their names in a file, for every worker."""
    finish: Callable[[], None]
    """All tensors have been handed over."""
    close: Callable[[], None]
    """The update is over, whether or not it was finished."""


class StreamedUpdate:
    """A `WeightUpdate` that holds no more than one group of tensors."""

    def __init__(
        self,
        steps: UpdateSteps,
        replica: Replica,
        table: Sequence[TensorSpec],
        weight_format: WeightFormat,
        device: torch.device,
    ) -> None:
        self._steps, self._replica, self._format, self._device = steps, replica, weight_format, device
        self._specs = {spec.name: spec for spec in table}
        self._missing = stored_tensors(table)
        self._views: dict[str, Tensor] = {}
        self._written: dict[str, Tensor] = {}
        self._overwrites = False
        self._open = True

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Whole tensors in the engine's precision, on this rank's device; of those that the model has."""
        self._check_open()
        known = [name for name in names if name in self._specs]
        for name in known:
            self._views[name] = torch.empty(self._specs[name].shape, dtype=self._format.dtype, device=self._device)
        return {name: self._views[name] for name in known}

    def load(self, names: Sequence[str]) -> None:
        """Hand the tensors over. From the first call on the old weights are gone. Collective over the replica."""
        taken: dict[str, Tensor] = {}
        self._replica.gather("taking weights", lambda: taken.update(self._take(names)))
        if not self._overwrites:
            self._overwrites = True
            self._steps.overwrite()
        if taken:
            self._steps.hand_over(taken)

    def commit(self) -> None:
        """Make the weights the engine's. Collective. Raises AlignerError naming tensors that were not loaded."""
        self._replica.gather("ending the update", self._check_complete)
        try:
            self._steps.finish()
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
        self._steps.close()

    def _check_open(self) -> None:
        if not self._open:
            raise AlignerError("this update is over; begin another one")


def ipc_handles(tensors: Mapping[str, Tensor], device_uuid: str) -> dict[str, str]:
    """Handles by which the worker on the GPU `device_uuid` opens these tensors: {uuid: base64 of a pickled list}.

    The list's entries are (name, (function, arguments)); function(*arguments) gives the tensor. A CUDA tensor is not
    copied: the receiver opens its memory, so the tensors have to live, unchanged, until it has answered; after that
    `torch.cuda.ipc_collect()` frees what it gave back. CPU tensors travel by value.
    Raises AlignerError naming the tensors and their devices when they lie on several.
    """
    devices = sorted({str(tensor.device) for tensor in tensors.values()})
    if len(devices) > 1:
        where = ", ".join(f"{name} ({tensor.device})" for name, tensor in tensors.items())
        raise AlignerError(f"tensors for GPU {device_uuid} lie on several devices, one is allowed: {where}")
    entries = [(name, reduce_tensor(tensor.detach())) for name, tensor in tensors.items()]
    return {device_uuid: base64.b64encode(pickle.dumps(entries)).decode()}
