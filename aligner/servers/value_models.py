"""The interface of the value models in the critic and reward servers.

`DeviceSharing` lets several models share the devices of their ranks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor


class ValueModel(Protocol):
    """A model with a scalar head, distributed over the role's ranks.

    Every rank calls every method with the same complete arguments, on the CPU, and receives the
    same complete result. An AlignerError is raised on all ranks.
    """

    @property
    def version(self) -> int:
        """Number of optimizer steps."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; token ids are smaller."""

    def values(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return values, float32 [B, S]. Entry t is the value after token t.

        Args:
            tokens: int64 [B, S].
            lengths: int64 [B].
        """

    def train(
        self, tokens: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor
    ) -> dict[str, float]:
        """Execute one optimizer step, and return its statistics, at least `loss`.

        Args:
            tokens: int64 [B, S].
            returns: float32 [B, S-1].
            old_values: float32 [B, S-1].
            mask: bool [B, S-1].
        """

    def begin_save(self, directory: Path) -> None:
        """Begin to write weights and optimizer state.

        Later updates do not change the written state.

        Args:
            directory: Directory of the checkpoint.
        """

    def finish_save(self) -> None:
        """Wait until the last `begin_save`, if any, is complete."""

    def load(self, directory: Path) -> None:
        """Load a saved state from a directory."""


class OffloadableModel(ValueModel, Protocol):
    """A value model that can be offloaded to host memory."""

    def sleep(self) -> None:
        """Free the device memory until `wake` is called."""

    def wake(self) -> None:
        """Move the model back to the device."""


class DeviceSharing:
    """Groups of models that share the devices of their ranks.

    The models of one group are on the devices, and the models of the other groups in host memory. A
    group moves to the devices when one of its models is used, and stays there until another group
    is used. Therefore nothing moves during consecutive requests to the same group.
    """

    def __init__(self) -> None:
        self._groups: dict[str, list[OffloadableModel]] = {}
        self._awake: str | None = None

    def add(self, group: str, model: OffloadableModel) -> ValueModel:
        """Offload a model, and return a model to use in its place.

        The returned model moves its group to the devices before it is used.

        Args:
            group: Name of the model's group.
            model: The model.
        """
        model.sleep()
        self._groups.setdefault(group, []).append(model)
        return cast(ValueModel, _SharingModel(model, lambda: self._wake(group)))

    def _wake(self, group: str) -> None:
        """Move a group to the devices, and the previous group to host memory."""
        if group == self._awake:
            return
        for model in self._groups.get(self._awake or "", ()):
            model.sleep()
        for model in self._groups[group]:
            model.wake()
        self._awake = group


class _SharingModel:
    """A value model that moves to its device before it is used."""

    def __init__(self, model: OffloadableModel, wake: Callable[[], None]) -> None:
        self._model = model
        self._wake = wake

    def __getattr__(self, name: str) -> Any:
        # `finish_save` does not need the device: it writes the copy that `begin_save` made.
        if name in ("values", "train", "begin_save", "load"):
            self._wake()
        return getattr(self._model, name)
