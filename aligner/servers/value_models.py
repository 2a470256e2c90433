"""What the critic and reward servers ask of a value model, and how two models share the devices of
their ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor


class ValueModel(Protocol):
    """A model with a scalar head, spread over the role's ranks.

    Every rank calls every method with the same full arguments, on the CPU, and gets the same full
    result. An AlignerError is raised on all ranks alike.
    """

    @property
    def version(self) -> int:
        """Optimizer steps taken."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    def values(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """float32 [B, S] of tokens int64 [B, S] and lengths int64 [B]: entry t is the value after
        token t."""

    def train(
        self, tokens: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor
    ) -> dict[str, float]:
        """One optimizer step on tokens int64 [B, S] and float32 and bool [B, S-1]; the result has
        at least `loss`."""

    def begin_save(self, directory: Path) -> None:
        """Begin to write weights and optimizer as they are now; what comes later does not change
        them."""

    def finish_save(self) -> None:
        """Wait until what was begun, if anything, is complete."""

    def load(self, directory: Path) -> None:
        """Read what was saved."""


class OffloadableModel(ValueModel, Protocol):
    """A value model that can wait in host memory."""

    def sleep(self) -> None:
        """Free the device's memory, until `wake`."""

    def wake(self) -> None:
        """Be as before."""


class DeviceSharing:
    """Groups of models that share their ranks' devices: the weights of one group are there, the
    others' in host memory.

    A group that is asked for anything takes the device and keeps it until another is, so that
    nothing moves while requests of one kind follow each other.
    """

    def __init__(self) -> None:
        self._groups: dict[str, list[OffloadableModel]] = {}
        self._awake: str | None = None

    def add(self, group: str, model: OffloadableModel) -> ValueModel:
        """The model, to be used in its place; it sleeps until it is used."""
        model.sleep()
        self._groups.setdefault(group, []).append(model)
        return cast(ValueModel, _SharingModel(model, lambda: self._wake(group)))

    def _wake(self, group: str) -> None:
        if group == self._awake:
            return
        for model in self._groups.get(self._awake or "", ()):
            model.sleep()
        for model in self._groups[group]:
            model.wake()
        self._awake = group


class _SharingModel:
    """A value model that has its device before it is used."""

    def __init__(self, model: OffloadableModel, wake: Callable[[], None]) -> None:
        self._model, self._wake = model, wake

    def __getattr__(self, name: str) -> Any:
        # `finish_save` writes from the copy that `begin_save` took
        if name in ("values", "train", "begin_save", "load"):
            self._wake()
        return getattr(self._model, name)
