"""What a teacher has said of demonstrations, once for all who learn from it: a directory of
safetensors files.

Each file holds some rows end to end: `tokens` int32 [T] of `lengths` int32 [B], which of them are
learned from (`learned`, bool [T]), and of those M, in their order, what `TaughtTokens` has:
`logprobs` float32 [M], `ids` int32 [M, k] and `outcomes` float32 [M, k+1]. Beside them are the
teacher's `tokenizer.json`, by which ids are the same tokens to the one who learns, and
`index.json`, written last: `top_k`, `vocabulary` (all ids are below it), and the size and the
checksum of each file.

A row is found by its tokens and by what is learned of it, wherever it is in the data of the one who
learns.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from aligner.data.checksums import (
    DamagedError,
    FileRecord,
    damage,
    file_record,
    read_sealed,
    sealed,
)
from aligner.data.tokenizer_files import read_tokenizer
from aligner.data.types import Rows, TaughtTokens
from aligner.errors import ConfigError
from aligner.files import write_file
from aligner.paths import TEACHER_SCORES_INDEX

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class TaughtRow:
    """Where a row's tokens are."""

    file: Path
    first: int
    count: int
    """Of the file's learned tokens."""

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """`logprobs` float32 [R], `ids` int32 [R, k] and `outcomes` float32 [R, k+1] of the row's
        learned tokens."""
        stored, span = _opened(self.file), slice(self.first, self.first + self.count)
        return (
            stored.get_slice("logprobs")[span],
            stored.get_slice("ids")[span],
            stored.get_slice("outcomes")[span],
        )


class TeacherScores:
    """A directory that a run of algorithm.trainer=teacher_scores has completed."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError where it is not there, not complete or not as it was written."""
        self.directory = directory
        try:
            index = read_sealed(directory / TEACHER_SCORES_INDEX)
        except DamagedError as error:
            raise ConfigError(f"teacher.scores: {error}") from error
        self.top_k: int = index["top_k"]
        self.vocabulary: int = index["vocabulary"]
        """All ids are below it."""
        self._files = {name: FileRecord(*record) for name, record in index["files"].items()}
        self._rows = {key: row for name in self._files for key, row in _rows_of(directory / name)}

    def require_undamaged(self) -> None:
        """Raise ConfigError for a file that is not as it was written. Reads all of them."""
        if problems := damage(self.directory, self._files):
            raise ConfigError(
                "\n".join(f"teacher.scores={self.directory}: {problem}" for problem in problems)
            )

    def find(self, tokens: Tensor, learned: Tensor) -> TaughtRow | None:
        """The row of these tokens int64 [T], learned from where `learned` bool [T] says; None where
        there is no such row."""
        return self._rows.get(_key(tokens, learned))


def taught_rows(found: Sequence[TaughtRow], mask: Tensor) -> TaughtTokens:
    """What was said at each place of the mask bool [B, S-1] of as many rows."""
    logprobs, ids, outcomes = map(torch.cat, zip(*(row.read() for row in found), strict=True))
    told = TaughtTokens(
        torch.zeros(mask.shape),
        torch.zeros(*mask.shape, ids.shape[1], dtype=torch.int32),
        torch.zeros(*mask.shape, outcomes.shape[1]),
    )
    told.logprobs[mask], told.ids[mask], told.outcomes[mask] = logprobs, ids, outcomes
    return told


def part_name(number: int, parts: int) -> str:
    """The file of one of so many parts, counted from 1."""
    return f"part_{number:05}_of_{parts:05}.safetensors"


def write_part(file: Path, rows: Rows, taught: TaughtTokens) -> None:
    """Write what was said of some rows, all or nothing."""
    inside = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
    tensors = {
        "tokens": rows.tokens[inside].int(),
        "lengths": rows.lengths.int(),
        "learned": F.pad(rows.mask, (1, 0))[inside],
        "logprobs": taught.logprobs[rows.mask],
        "ids": taught.ids[rows.mask],
        "outcomes": taught.outcomes[rows.mask],
    }
    write_file(file, save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def complete(directory: Path, parts: int, top_k: int, vocabulary: int, tokenizer: Path) -> None:
    """Complete a directory of `parts` files, so that it can be read.

    Args:
        tokenizer: The teacher's `tokenizer.json`. If its directory has vocab.json and merges.txt
            instead, the tokenizer that they describe is written.
    """
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, directory / _TOKENIZER)
    else:
        read_tokenizer(tokenizer.parent).save(str(directory / _TOKENIZER))
    names = [part_name(number, parts) for number in range(1, parts + 1)]
    files = {name: file_record(directory / name) for name in names}
    index = {"top_k": top_k, "vocabulary": vocabulary, "files": files}
    write_file(directory / TEACHER_SCORES_INDEX, sealed(json.dumps(index, indent=1) + "\n"))


def _rows_of(file: Path) -> list[tuple[bytes, TaughtRow]]:
    """The keys and places of a file's rows."""
    stored = _opened(file)
    lengths = stored.get_tensor("lengths").tolist()
    parts = zip(
        stored.get_tensor("tokens").split(lengths),
        stored.get_tensor("learned").split(lengths),
        strict=True,
    )
    found, first = [], 0
    for tokens, learned in parts:
        count = int(learned.sum())
        found.append((_key(tokens, learned), TaughtRow(file, first, count)))
        first += count
    return found


def _key(tokens: Tensor, learned: Tensor) -> bytes:
    digest = xxhash.xxh3_128(tokens.int().numpy().tobytes())
    digest.update(learned.numpy().tobytes())
    return digest.digest()


@lru_cache(maxsize=256)
def _opened(file: Path) -> Any:
    """Mapped into memory, so that of all its rows those that are asked for are read."""
    return safe_open(str(file), framework="pt")
