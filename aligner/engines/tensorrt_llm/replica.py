"""The ranks of a replica: one of them drives TensorRT-LLM, the others' GPUs take part and their calls return the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from aligner.data.collectives import broadcast_json, gather_json
from aligner.errors import AlignerError

T = TypeVar("T")


class Replica:
    """This rank's place among the ranks of a replica."""

    def __init__(self, rank: int, size: int, group: ProcessGroup | None) -> None:
        """`rank` of `size`; `group` holds them in order (None: there is one)."""
        self.rank, self.size, self._group = rank, size, group

    @property
    def drives(self) -> bool:
        """Whether this rank is the one that drives TensorRT-LLM."""
        return self.rank == 0

    def lead(self, what: str, action: Callable[[], T]) -> T:
        """What the driving rank's action returns, a JSON value, on every rank. Collective.

        Raises AlignerError on every rank when it fails, and what it raised on the driving rank.
        """
        if not self.drives:
            answer = broadcast_json(None, group=self._group)
            if "error" in answer:
                raise AlignerError(f"{what} failed on the rank that drives TensorRT-LLM: {answer['error']}")
            result: T = answer["value"]
            return result
        try:
            value = action()
        except BaseException as error:
            if self.size > 1:
                broadcast_json({"error": f"{type(error).__name__}: {error}"}, group=self._group)
            raise
        if self.size > 1:
            broadcast_json({"value": value}, group=self._group)
        return value

    def gather(self, what: str, action: Callable[[], Any]) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank. Collective.

        Raises AlignerError on every rank, naming the ranks that failed, when any does.
        """
        if self.size == 1:
            return [action()]
        failure: BaseException | None = None
        try:
            mine: dict[str, Any] = {"value": action()}
        except Exception as error:
            failure, mine = error, {"error": f"{type(error).__name__}: {error}"}
        answers = gather_json(mine, group=self._group)
        if failed := [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]:
            raise AlignerError(f"{what} failed on " + "; ".join(failed)) from failure
        return [answer["value"] for answer in answers]
