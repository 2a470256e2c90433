"""What the ranks are asked to do, and how commands that wait together become one."""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Handler = Callable[..., Any]
"""Called with the command's tensors and arguments by keyword, on every rank. May be a generator,
which yields None."""
_H = TypeVar("_H", bound=Handler)


@dataclass(frozen=True, eq=False)
class Command:
    """Work for the whole world."""

    op: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON values"""
    alone: bool = False
    """Never joined with others: rounding differs with what is computed together, and that is a
    matter of timing."""
    future: Future[Any] = field(default_factory=Future)


def rows_of(command: Command) -> dict[str, int]:
    """What there is to say of a command's size: `rows`, and `tokens`, padding included, where it
    has either."""
    tokens = command.tensors.get("tokens")
    if tokens is not None:
        return {"rows": len(tokens), "tokens": tokens.numel()}
    return {"rows": len(command.arguments["texts"])} if "texts" in command.arguments else {}


@dataclass(frozen=True)
class RowJoin:
    """How commands of an op whose rows do not know of each other are computed as one.

    Tensors and results are [B], or [B, S] padded with zeros; a result may be a mapping of such
    tensors. An argument in `listed` is a list with a value a row.
    """

    listed: tuple[str, ...] = ()

    def size(self, command: Command) -> tuple[int, int]:
        """Rows, and tokens a row."""
        counts = [len(tensor) for tensor in command.tensors.values()]
        counts += [len(command.arguments[name]) for name in self._listed_in(command)]
        return max(counts), max(
            (tensor.shape[1] for tensor in command.tensors.values() if tensor.ndim > 1), default=1
        )

    def kind(self, command: Command) -> tuple[Any, ...]:
        """Equal for commands that can be joined: names of tensors and lists, and the arguments
        beside them."""
        listed = self._listed_in(command)
        return (
            set(command.tensors),
            listed,
            {name: arg for name, arg in command.arguments.items() if name not in listed},
        )

    def joined(self, commands: Sequence[Command]) -> Command:
        """The rows of all, as wide as the widest."""
        first, width = commands[0], max(self.size(command)[1] for command in commands)
        tensors = {
            name: torch.cat([_padded(each.tensors[name], width) for each in commands])
            for name in first.tensors
        }
        lists = {
            name: list(itertools.chain.from_iterable(each.arguments[name] for each in commands))
            for name in self._listed_in(first)
        }
        return Command(first.op, tensors, {**first.arguments, **lists})

    def split(self, result: Any, commands: Sequence[Command]) -> list[Any]:
        """Each command's rows, as wide as it was itself."""
        if isinstance(result, Mapping):
            parts = {name: self.split(tensor, commands) for name, tensor in result.items()}
            return [{name: parts[name][place] for name in parts} for place in range(len(commands))]
        sizes = [self.size(command) for command in commands]
        rows = result.split([count for count, _ in sizes])
        return [
            part if part.ndim == 1 else part[:, :width].contiguous()
            for part, (_, width) in zip(rows, sizes, strict=True)
        ]

    def _listed_in(self, command: Command) -> list[str]:
        return [name for name in self.listed if command.arguments.get(name) is not None]


def rank_handler(*, join: RowJoin | None = None, at_pauses: bool = False) -> Callable[[_H], _H]:
    """Mark a handler: commands of its op that wait together may be joined, or may run where another
    command pauses."""

    def mark(handler: _H) -> _H:
        handler.join, handler.at_pauses = join, at_pauses  # type: ignore[attr-defined]
        return handler

    return mark


def take_together(
    waiting: deque[Command], joins: Mapping[str, RowJoin], budget: int
) -> list[Command]:
    """Take the first command, and those like it right behind it that fit into `budget` tokens,
    padding included.

    Those whose width is nearest come first. A command is never taken past one that is not like it:
    order is a promise.
    """
    first = waiting.popleft()
    join = joins.get(first.op)
    if join is None or first.alone or not waiting:
        return [first]
    kind, taken = join.kind(first), [first]
    alike = list(
        itertools.takewhile(
            lambda each: each.op == first.op and not each.alone and join.kind(each) == kind, waiting
        )
    )
    rows, width = own = join.size(first)
    sizes = {other: join.size(other) for other in alike}
    for other in sorted(alike, key=lambda command: abs(sizes[command][1] - own[1])):
        more, wide = rows + sizes[other][0], max(width, sizes[other][1])
        if more * wide <= budget:
            rows, width = more, wide
            taken.append(other)
            waiting.remove(other)
    return taken


def _padded(tensor: Tensor, width: int) -> Tensor:
    return (
        tensor
        if tensor.ndim == 1 or tensor.shape[1] == width
        else F.pad(tensor, (0, width - tensor.shape[1]))
    )
