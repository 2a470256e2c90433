"""New weights for the embedded engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from aligner.errors import AlignerError


class EmbeddedUpdate:
    """A `WeightUpdate` whose views are the storage that will serve: nothing is held twice, nothing moves at the end."""

    group_bytes = None

    def __init__(self, version: int, views: Mapping[str, Tensor], end: Callable[[bool], None]) -> None:
        """`end` is told, once, whether the update succeeded."""
        self.version = version
        self._views, self._missing, self._end = views, dict.fromkeys(views), end
        self._open = True

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Where to write these tensors: this rank's slices of those that there are."""
        self._check_open()
        return {name: self._views[name] for name in names if name in self._views}

    def load(self, names: Sequence[str]) -> None:
        """These tensors have been written."""
        self._check_open()
        for name in names:
            self._missing.pop(name, None)

    def commit(self) -> None:
        """The new weights serve. Raises AlignerError, and stays open, when some were never written."""
        self._check_open()
        if self._missing:
            raise AlignerError(f"the update to version {self.version} lacks {', '.join(self._missing)}")
        self._open = False
        self._end(True)

    def abort(self) -> None:
        """The old weights, where they still are, go on serving."""
        if self._open:
            self._open = False
            self._end(False)

    def _check_open(self) -> None:
        if not self._open:
            raise AlignerError(f"the update to version {self.version} has ended already")
