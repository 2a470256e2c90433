"""Assign the samples of a generation to the replicas of an engine."""

from collections import deque
from collections.abc import Collection, Sequence


class Router:
    """Assigns samples to replicas.

    If all samples fit into the batches of the replicas, each replica gets the same number of
    samples. Otherwise samples wait, and whenever a replica has room, the replica with the fewest
    incomplete samples gets the next prompt. The samples of a prompt are assigned together, so that
    a replica prefills the prompt once; a prompt is divided only to give the last samples to all
    replicas.

    Every rank has a router, and makes the same calls, so that the ranks agree without messages. The
    assignment depends on which samples are complete at each call of `assign`, and on nothing else.
    """

    def __init__(self, prompts: Sequence[int], replicas: int, batch_size: int | None) -> None:
        """
        Args:
            prompts: Index of the prompt of each sample; the samples of a prompt are adjacent.
            replicas: Number of replicas.
            batch_size: Number of samples that a replica generates at the same time; None assigns
                all samples at the first call of `assign`.
        """
        self._prompts = prompts
        self._batch_size = batch_size
        self._waiting = deque(range(len(prompts)))
        """Samples that are not assigned, in the order of their assignment."""
        self._assigned: list[list[int]] = [[] for _ in range(replicas)]
        """Samples of each replica, in the order of their assignment."""
        self._incomplete: list[set[int]] = [set() for _ in range(replicas)]
        """Assigned samples of each replica that are not complete."""

    @property
    def waiting(self) -> Sequence[int]:
        """The samples that are not assigned, in the order of their assignment."""
        return self._waiting

    def get_assigned(self, replica: int) -> Sequence[int]:
        """Return the samples of a replica, complete or not, in the order of their assignment."""
        return self._assigned[replica]

    def complete(self, samples: Collection[int]) -> None:
        """Mark samples as complete."""
        for incomplete in self._incomplete:
            incomplete.difference_update(samples)

    def withdraw(self, replica: int) -> int:
        """Take the incomplete samples from a replica that has exited; they are assigned next.

        Returns the number of these samples.
        """
        incomplete = self._incomplete[replica]
        withdrawn = [sample for sample in self._assigned[replica] if sample in incomplete]
        self._assigned[replica] = [
            sample for sample in self._assigned[replica] if sample not in incomplete
        ]
        incomplete.clear()
        self._waiting.extendleft(reversed(withdrawn))
        return len(withdrawn)

    def assign(self, is_available: Sequence[bool]) -> list[list[int]]:
        """Assign the samples for which there is room.

        Args:
            is_available: Whether each replica may get samples; at least one must.

        Returns:
            The new samples of each replica.
        """
        replicas = [replica for replica, available in enumerate(is_available) if available]
        starts = [len(assigned) for assigned in self._assigned]
        incomplete_count = sum(len(self._incomplete[replica]) for replica in replicas)
        total = len(self._waiting) + incomplete_count
        if self._batch_size is None or total <= len(replicas) * self._batch_size:
            share = -(-total // len(replicas))  # rounded up
            for replica in replicas:
                self._assign_next(replica, share - len(self._incomplete[replica]))
        else:
            self._assign_prompts(replicas, self._batch_size)
        return [assigned[start:] for assigned, start in zip(self._assigned, starts, strict=True)]

    def _assign_prompts(self, replicas: Sequence[int], batch_size: int) -> None:
        """Assign one prompt after another to the replica with the fewest incomplete samples."""
        while self._waiting:
            replica = min(replicas, key=lambda replica: len(self._incomplete[replica]))
            if len(self._incomplete[replica]) >= batch_size:
                return
            prompt = self._prompts[self._waiting[0]]
            adjacent = next(
                (
                    count
                    for count, sample in enumerate(self._waiting)
                    if self._prompts[sample] != prompt
                ),
                len(self._waiting),
            )
            self._assign_next(replica, adjacent)

    def _assign_next(self, replica: int, count: int) -> None:
        """Assign the first `count` waiting samples, or as many as there are."""
        for _ in range(min(count, len(self._waiting))):
            sample = self._waiting.popleft()
            self._assigned[replica].append(sample)
            self._incomplete[replica].add(sample)
