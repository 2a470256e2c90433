"""Checksums of what a run goes on from: a byte that is not as it was written is found when it is
read.

They are xxHash's (XXH3, 64 bits), which costs little beside reading. They find accidents, not
attackers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from aligner.errors import AlignerError

_SEAL = '{{"checksum": "{}",'
_SEALED_FROM = len(_SEAL.format("0" * 16))
_RECORD_BYTES = 8
_CHUNK = 1 << 20
"""Read at a time: small enough to stay in the cache."""


class DamagedError(AlignerError):
    """A file is not as it was written."""


class FileRecord(NamedTuple):
    """What a file's bytes must be."""

    size: int
    checksum: str


def file_record(file: Path) -> FileRecord:
    """Of a file as it is now. Raises OSError."""
    digest, size, buffer = xxhash.xxh3_64(), 0, memoryview(bytearray(_CHUNK))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


def damage(directory: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """What is wrong with files of a directory, each named by its path there."""
    problems = []
    for name, wanted in files.items():
        try:
            found = file_record(directory / name)
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
            continue
        if found != wanted:
            problems.append(
                f"{name} is damaged: expected {wanted.size} bytes with checksum {wanted.checksum},"
                f" found {found.size} bytes with checksum {found.checksum}"
            )
    return problems


def sealed(text: str) -> str:
    """A JSON object's text, with the checksum of it all as its first entry, `checksum`."""
    return _SEAL.format(xxhash.xxh3_64_hexdigest(text.encode())) + text[1:]


def unsealed(text: str) -> dict[str, Any]:
    """The object whose text was `sealed`, without the checksum. Raises DamagedError where it is not
    as it was sealed."""
    if text != sealed("{" + text[_SEALED_FROM:]):
        raise DamagedError("damaged: the content does not match the checksum")
    content = json.loads(text)
    del content["checksum"]
    return content


def read_sealed(file: Path) -> dict[str, Any]:
    """The object whose text was `sealed`, without the checksum. Raises DamagedError where it is not
    as it was written."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"{file}: cannot be read: {error}") from error
    try:
        return unsealed(text)
    except DamagedError as error:
        raise DamagedError(f"{file}: {error}") from error


def sealed_record(content: bytes) -> bytes:
    """Bytes with their checksum before them."""
    return xxhash.xxh3_64_digest(content) + content


def read_sealed_record(file: Path) -> bytes:
    """The bytes that a file is the `sealed_record` of. Raises OSError, and DamagedError where they
    are not those."""
    content = file.read_bytes()
    if sealed_record(content[_RECORD_BYTES:]) != content:
        raise DamagedError(f"{file}: damaged: the content does not match the checksum")
    return content[_RECORD_BYTES:]
