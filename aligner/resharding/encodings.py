"""The encoding of weights that sends only changed elements (`engine.publish=changes`)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from aligner.resharding.link import Link
from aligner.resharding.transport import Encoding, Piece, Step

_INDEX = torch.int32
_BITS = {2: torch.int16, 4: torch.int32}


class Changes(Encoding):
    """Send the index and value of each element that differs from the previous publish, or the whole
    piece if that takes fewer bytes.

    Elements are compared bit by bit, so the engine gets exactly the source's bits, including the
    sign of a zero. The engine's tensors must still hold the elements of the previous publish.
    """

    def __init__(
        self, dtype: torch.dtype, counts: Mapping[Piece, int], before: Callable[[Piece], Tensor]
    ) -> None:
        """`counts` is how many numbers of each piece have changed; `before` gives its rows at the
        publish before."""
        super().__init__(dtype)
        self._counts, self._before = counts, before

    @classmethod
    def agreed(
        cls,
        order: Sequence[Step],
        link: Link,
        dtype: torch.dtype,
        rows: Callable[[Piece], Tensor],
        before: Callable[[Piece], Tensor],
    ) -> "Changes":
        """Count what has changed of the pieces that this rank sends, and hear it of those that it
        receives. Collective."""
        counts: dict[Piece, int] = {}
        sending: dict[int, list[Piece]] = {}
        receiving: dict[int, list[Piece]] = {}
        for step in order:
            sending.setdefault(step.to, []).extend(
                piece for message in step.sending for piece in message
            )
            receiving.setdefault(step.from_, []).extend(
                piece for message in step.receiving for piece in message
            )
        sent, received = [], []
        for to, pieces in sending.items():
            counts |= {
                piece: int(_changed(rows(piece).to(dtype), before(piece)).sum()) for piece in pieces
            }
            if pieces:
                sent.append(
                    (torch.tensor([counts[piece] for piece in pieces], device=link.device), to)
                )
        for from_, pieces in receiving.items():
            if pieces:
                received.append(
                    (torch.empty(len(pieces), dtype=torch.int64, device=link.device), from_)
                )
        link.post(sent, received)
        link.complete()
        changed = sum(counts.values())
        for heard, from_ in received:
            counts |= dict(zip(receiving[from_], heard.tolist(), strict=True))
        agreed = cls(dtype, counts, before)
        agreed.changed = changed
        return agreed

    def nbytes(self, piece: Piece) -> int:
        """Of what has changed, or of all."""
        return min(
            super().nbytes(piece), self._counts[piece] * (_INDEX.itemsize + self._dtype.itemsize)
        )

    def is_plain(self, piece: Piece) -> bool:
        """Whether so much has changed that all of it is less."""
        return self.nbytes(piece) == super().nbytes(piece)

    def pack(self, piece: Piece, rows: Tensor, packed: Tensor) -> None:
        """Write indices, then numbers."""
        if self.is_plain(piece):
            super().pack(piece, rows, packed)
            return
        rows = rows.to(self._dtype)
        index = _changed(rows, self._before(piece)).flatten().nonzero().flatten()
        # By bytes: numbers of two bytes may leave the next piece's indices at an address that is no
        # multiple of four.
        split = len(index) * _INDEX.itemsize
        packed[:split].copy_(index.to(_INDEX).view(torch.uint8))
        packed[split:].copy_(rows.flatten()[index].view(torch.uint8))

    def unpack(self, piece: Piece, packed: Tensor, place: Tensor) -> None:
        """Write the numbers over those that they replace."""
        if self.is_plain(piece):
            super().unpack(piece, packed, place)
            return
        split = self._counts[piece] * _INDEX.itemsize
        index = packed[:split].clone().view(_INDEX).long().to(place.device)
        numbers = packed[split:].clone().view(self._dtype).to(place.device)
        place[torch.unravel_index(index, place.shape)] = numbers


def _changed(rows: Tensor, before: Tensor) -> Tensor:
    """bool, of the rows' shape: which bits differ."""
    bits = _BITS[rows.dtype.itemsize]
    return rows.view(bits) != before.view(bits)
