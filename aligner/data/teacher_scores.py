"""Stored teacher scores: a teacher's top-k log-probs of demonstrations, for any number of students.

The scores are a directory of safetensors files. Each file contains B rows, concatenated:

- `tokens`: int32 [T], the rows' tokens
- `lengths`: int32 [B], the number of tokens of each row
- `learned`: bool [T], the loss mask: the M tokens on which a student trains
- `logprobs`: float32 [M], `ids`: int32 [M, k] and `outcomes`: float32 [M, k+1], the fields of
  `TeacherTopK` for these M tokens, in their order

The directory also contains the teacher's `tokenizer.json`, with which a run checks that the student
has the same token ids, and `index.json`, which is written last. The index contains `top_k`,
`vocabulary` (an upper bound of all ids), and the size and checksum of each file.

A row is looked up by its tokens and its loss mask, so its position in the student's data does not
matter.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from aligner.data.checksums import (
    DamagedError,
    FileRecord,
    compute_file_record,
    find_damage,
    read_sealed,
    seal,
)
from aligner.data.tokenizer_files import read_tokenizer
from aligner.data.types import Rows, TeacherTopK
from aligner.errors import ConfigError
from aligner.files import write_file
from aligner.paths import TEACHER_SCORES_INDEX

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class TeacherScoresRow:
    """Location of a row's scores: a range of the learned tokens of a file."""

    file: Path
    first: int
    """Index of the row's first learned token among the file's learned tokens."""
    count: int
    """Number of learned tokens of the row."""

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """Read the scores of the row's R learned tokens.

        Returns:
            `logprobs` float32 [R], `ids` int32 [R, k] and `outcomes` float32 [R, k+1].
        """
        stored = _open_file(self.file)
        span = slice(self.first, self.first + self.count)
        return (
            stored.get_slice("logprobs")[span],
            stored.get_slice("ids")[span],
            stored.get_slice("outcomes")[span],
        )


class TeacherScores:
    """The scores that a completed run with algorithm.trainer=teacher_scores wrote."""

    def __init__(self, directory: Path) -> None:
        """Read the index.

        Raises:
            ConfigError: The directory does not exist or is not complete, or the index is damaged.
        """
        self.directory = directory
        try:
            index = read_sealed(directory / TEACHER_SCORES_INDEX)
            self.top_k = int(index["top_k"])
            self.vocabulary = int(index["vocabulary"])
            """Upper bound of all token ids (exclusive)."""
            self._files = {name: FileRecord(*record) for name, record in index["files"].items()}
        except DamagedError as error:
            raise ConfigError(f"teacher.scores: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ConfigError(
                f"teacher.scores: {directory / TEACHER_SCORES_INDEX}: not an index of scores:"
                f" {error!r:.200}"
            ) from error
        for name in self._files:
            if Path(name).name != name:
                raise ConfigError(
                    f"teacher.scores: {directory / TEACHER_SCORES_INDEX}: {name!r}: must be the"
                    " name of a file in the directory"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process read the index from the same directory."""
        return TeacherScores, (self.directory,)

    @property
    def identity(self) -> Mapping[str, Any]:
        """JSON object that determines the scores of every row."""
        return {"directory": str(self.directory), "files": self._files}

    @cached_property
    def _rows(self) -> Mapping[bytes, TeacherScoresRow]:
        """Location of every row by its key."""
        return {
            key: row for name in self._files for key, row in _locate_rows(self.directory / name)
        }

    def require_undamaged(self) -> None:
        """Raise ConfigError if a file does not match its checksum. Reads all files."""
        if problems := find_damage(self.directory, self._files):
            raise ConfigError(
                "\n".join(f"teacher.scores={self.directory}: {problem}" for problem in problems)
            )

    def find(self, tokens: Tensor, learned: Tensor) -> TeacherScoresRow | None:
        """Return the location of a row's scores; None if the directory does not contain the row.

        Args:
            tokens: The row's tokens, int64 [T].
            learned: The row's loss mask, bool [T].
        """
        return self._rows.get(_key(tokens, learned))


def assemble_teacher_scores(rows: Sequence[TeacherScoresRow], mask: Tensor) -> TeacherTopK:
    """Read the scores of a batch of rows.

    Args:
        rows: The B rows.
        mask: Loss mask of the rows, bool [B, S-1].
    """
    logprobs, ids, outcomes = map(torch.cat, zip(*(row.read() for row in rows), strict=True))
    scores = TeacherTopK(
        torch.zeros(mask.shape),
        torch.zeros(*mask.shape, ids.shape[1], dtype=torch.int32),
        torch.zeros(*mask.shape, outcomes.shape[1]),
    )
    scores.logprobs[mask] = logprobs
    scores.ids[mask] = ids
    scores.outcomes[mask] = outcomes
    return scores


def part_name(number: int, parts: int) -> str:
    """Return the file name of a part; the parts are numbered from 1."""
    return f"part_{number:05}_of_{parts:05}.safetensors"


def write_part(file: Path, rows: Rows, taught: TeacherTopK) -> None:
    """Write the scores of some rows as one file, atomically."""
    # Padding is not stored.
    is_token = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
    tensors = {
        "tokens": rows.tokens[is_token].int(),
        "lengths": rows.lengths.int(),
        "learned": F.pad(rows.mask, (1, 0))[is_token],
        "logprobs": taught.logprobs[rows.mask],
        "ids": taught.ids[rows.mask],
        "outcomes": taught.outcomes[rows.mask],
    }
    write_file(file, save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def write_index(directory: Path, parts: int, top_k: int, vocabulary: int, tokenizer: Path) -> None:
    """Write the tokenizer and the index of a directory whose parts are all written.

    Args:
        directory: The directory.
        parts: Number of files.
        top_k: Number of tokens k for which each position has a log-prob.
        vocabulary: Upper bound of all token ids (exclusive).
        tokenizer: The teacher's `tokenizer.json`. If its directory has vocab.json and merges.txt
            instead, the tokenizer that they describe is written.
    """
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, directory / _TOKENIZER)
    else:
        read_tokenizer(tokenizer.parent).save(str(directory / _TOKENIZER))
    names = [part_name(number, parts) for number in range(1, parts + 1)]
    files = {name: compute_file_record(directory / name) for name in names}
    index = {"top_k": top_k, "vocabulary": vocabulary, "files": files}
    write_file(directory / TEACHER_SCORES_INDEX, seal(json.dumps(index, indent=1) + "\n"))


def _locate_rows(file: Path) -> list[tuple[bytes, TeacherScoresRow]]:
    """Return the key and the location of each row of a file.

    Raises:
        ConfigError: The file does not contain rows with scores.
    """
    try:
        return _locate_stored_rows(file)
    except (SafetensorError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"teacher.scores: {file} cannot be read: {error}") from error


def _locate_stored_rows(file: Path) -> list[tuple[bytes, TeacherScoresRow]]:
    stored = _open_file(file)
    lengths = stored.get_tensor("lengths").tolist()
    parts = zip(
        stored.get_tensor("tokens").split(lengths),
        stored.get_tensor("learned").split(lengths),
        strict=True,
    )
    rows = []
    first = 0
    for tokens, learned in parts:
        count = int(learned.sum())
        rows.append((_key(tokens, learned), TeacherScoresRow(file, first, count)))
        first += count
    return rows


def _key(tokens: Tensor, learned: Tensor) -> bytes:
    """Return the hash of a row's tokens and loss mask."""
    digest = xxhash.xxh3_128(tokens.int().numpy().tobytes())
    digest.update(learned.numpy().tobytes())
    return digest.digest()


@lru_cache(maxsize=256)
def _open_file(file: Path) -> Any:
    """Open a file mapped into memory, so that only the requested rows are read."""
    return safe_open(str(file), framework="pt")
