"""The receiving side of a publish: where new weights go, and the moment they count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aligner.schema import EngineParallelConfig


@dataclass(frozen=True)
class WeightFormat:
    """How an engine takes its weights."""

    layout: EngineParallelConfig
    """To publish to, over the engine's ranks."""
    dtype: torch.dtype
    group_bytes: int | None
    """Most bytes of tensors that an update takes at a time; None: all its views exist at once."""


class WeightUpdate(Protocol):
    """An engine rank's open update. It ends with one `commit` or one `abort`.

    Tensors go by Hugging Face name and are this rank's slices, as the plan's target says.
    """

    @property
    def group_bytes(self) -> int | None:
        """Most bytes of tensors that are written between a `views` and its `load`; None: all of them at once."""
        ...

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Where to write these tensors; those that the engine does not have are left out."""
        ...

    def load(self, names: Sequence[str]) -> None:
        """These tensors have been written; their views are not used again, unless `group_bytes` is None."""
        ...

    def commit(self) -> None:
        """All tensors have been loaded on every rank: they are the engine's now."""
        ...

    def abort(self) -> None:
        """The update failed somewhere: the engine stays at the version it had, or has none if that was overwritten."""
        ...
