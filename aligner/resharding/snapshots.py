"""A rank's weights as they were at several versions, for those who take them later than they were made."""

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from aligner.errors import AlignerError
from aligner.resharding.transport import Read


class Snapshots:
    """Copies of source slices in host memory, by version; one thread takes them, another reads them.

    The memory of what is forgotten is used again, so that there are never more copies than versions that are wanted at once.
    """

    def __init__(self, source: Read, names: Iterable[str], dtype: torch.dtype, device: torch.device) -> None:
        """`source` gives this rank's slices of `names` as they are now; copies are kept as `dtype` and read on `device`."""
        self._source, self._names, self._dtype, self._device = source, tuple(names), dtype, device
        self._selected: dict[str, Tensor] = {}
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._free: list[dict[str, Tensor]] = []
        self._changed = threading.Condition()

    @torch.no_grad()
    def take(self, version: int) -> None:
        """Copy the weights; they may change once this returns."""
        with self._changed:
            copies = self._free.pop() if self._free else {}
        for name in self._names:
            tensor = self._source(name)
            if name not in copies:
                copies[name] = torch.empty(tensor.shape, dtype=self._dtype)
            copies[name].copy_(tensor)
        with self._changed:
            self._kept[version] = copies
            self._changed.notify_all()

    def select(self, version: int, timeout_s: float) -> None:
        """Have `read` give a version, once it is taken. Raises AlignerError when it is not in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: version in self._kept, timeout_s):
                raise AlignerError(f"weights version {version} was not taken within {timeout_s:g} s")
            self._selected = self._kept[version]

    def read(self, name: str) -> Tensor:
        """The slice of the version that was selected."""
        return self._selected[name].to(self._device)

    def forget_below(self, version: int) -> None:
        """Older versions than this, which is selected, are not read any more."""
        with self._changed:
            for old in [kept for kept in self._kept if kept < version]:
                self._free.append(self._kept.pop(old))
