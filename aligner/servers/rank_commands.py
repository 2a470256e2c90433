"""Commands for the ranks of a server, and the batching of commands that wait for execution."""

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
"""Function of an operation, which every rank calls with the command's tensors and arguments as
keyword arguments. It may be a generator that yields None at pauses."""
_H = TypeVar("_H", bound=Handler)


@dataclass(frozen=True, eq=False)
class Command:
    """Work for all ranks."""

    op: str
    """Name of the operation."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    is_unbatched: bool = False
    """Whether the command is never batched with others. Rounding depends on the rows that are
    computed together, and therefore on the timing of requests."""
    future: Future[Any] = field(default_factory=Future)
    """Result of the command."""


def count_rows(command: Command) -> dict[str, int]:
    """Return the size of a command: `rows`, and `tokens` including padding, if it has them."""
    tokens = command.tensors.get("tokens")
    if tokens is not None:
        return {"rows": len(tokens), "tokens": tokens.numel()}
    return {"rows": len(command.arguments["texts"])} if "texts" in command.arguments else {}


@dataclass(frozen=True)
class RowBatcher:
    """Batches commands of an operation whose rows are independent.

    Tensors and results have the shape [B], or [B, S] with zero padding. A result may also be a
    mapping of such tensors.
    """

    list_arguments: tuple[str, ...] = ()
    """Names of arguments that are lists with one value per row."""

    def size(self, command: Command) -> tuple[int, int]:
        """Return the number of rows, and the number of tokens per row."""
        counts = [len(tensor) for tensor in command.tensors.values()]
        counts += [len(command.arguments[name]) for name in self._find_list_arguments(command)]
        widths = (tensor.shape[1] for tensor in command.tensors.values() if tensor.ndim > 1)
        return max(counts), max(widths, default=1)

    def batch_key(self, command: Command) -> tuple[Any, ...]:
        """Return a key that is equal for commands that can be batched.

        It consists of the names of tensors and list arguments, and the values of all other
        arguments.
        """
        list_arguments = self._find_list_arguments(command)
        return (
            set(command.tensors),
            list_arguments,
            {name: arg for name, arg in command.arguments.items() if name not in list_arguments},
        )

    def batch(self, commands: Sequence[Command]) -> Command:
        """Return a command with the rows of all commands, padded to the greatest width."""
        first = commands[0]
        width = max(self.size(command)[1] for command in commands)
        tensors = {
            name: torch.cat([_pad(command.tensors[name], width) for command in commands])
            for name in first.tensors
        }
        lists = {
            name: list(
                itertools.chain.from_iterable(command.arguments[name] for command in commands)
            )
            for name in self._find_list_arguments(first)
        }
        return Command(first.op, tensors, {**first.arguments, **lists})

    def split(self, result: Any, commands: Sequence[Command]) -> list[Any]:
        """Split the result of a batch into the results of its commands.

        Each command receives its rows, in its own width.
        """
        if isinstance(result, Mapping):
            parts = {name: self.split(tensor, commands) for name, tensor in result.items()}
            return [{name: parts[name][index] for name in parts} for index in range(len(commands))]
        sizes = [self.size(command) for command in commands]
        rows = result.split([count for count, _ in sizes])
        return [
            part if part.ndim == 1 else part[:, :width].contiguous()
            for part, (_, width) in zip(rows, sizes, strict=True)
        ]

    def _find_list_arguments(self, command: Command) -> list[str]:
        """Return the names of the list arguments that the command has."""
        return [name for name in self.list_arguments if command.arguments.get(name) is not None]


def rank_handler(
    *, batcher: RowBatcher | None = None, runs_at_pauses: bool = False
) -> Callable[[_H], _H]:
    """Return a decorator that marks a handler.

    Args:
        batcher: How to batch commands of the handler's operation; None disables batching.
        runs_at_pauses: Whether a command of the operation may run at the pauses of another command.
    """

    def mark(handler: _H) -> _H:
        handler.batcher = batcher  # type: ignore[attr-defined]
        handler.runs_at_pauses = runs_at_pauses  # type: ignore[attr-defined]
        return handler

    return mark


def take_batch(
    queue: deque[Command], batchers: Mapping[str, RowBatcher], budget: int
) -> list[Command]:
    """Remove the first command from the queue, with the commands that can be batched with it.

    Only commands directly after the first one are considered, up to the first command that cannot
    be batched: commands must not overtake each other. Commands with the most similar width are
    preferred.

    Args:
        queue: Commands in the order of their arrival.
        batchers: Batcher of each operation.
        budget: Maximum number of tokens in a batch, including padding.
    """
    first = queue.popleft()
    batcher = batchers.get(first.op)
    if batcher is None or first.is_unbatched or not queue:
        return [first]

    # Candidates are adjacent to the first command: a command must not overtake another operation.
    batch_key = batcher.batch_key(first)
    batch = [first]
    candidates = list(
        itertools.takewhile(
            lambda command: (
                command.op == first.op
                and not command.is_unbatched
                and batcher.batch_key(command) == batch_key
            ),
            queue,
        )
    )

    # Similar widths waste the least padding. The oldest command is always in the batch.
    rows, width = first_size = batcher.size(first)
    sizes = {candidate: batcher.size(candidate) for candidate in candidates}
    for candidate in sorted(candidates, key=lambda command: abs(sizes[command][1] - first_size[1])):
        new_rows = rows + sizes[candidate][0]
        new_width = max(width, sizes[candidate][1])
        if new_rows * new_width <= budget:
            rows = new_rows
            width = new_width
            batch.append(candidate)
            queue.remove(candidate)
    return batch


def _pad(tensor: Tensor, width: int) -> Tensor:
    return (
        tensor
        if tensor.ndim == 1 or tensor.shape[1] == width
        else F.pad(tensor, (0, width - tensor.shape[1]))
    )
