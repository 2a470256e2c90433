"""Checksums of the files that a run resumes from, which detect bytes that changed after writing.

The checksum is xxHash's XXH3 with 64 bits; computing it costs little compared with reading the
file. It detects accidental damage, not deliberate changes by an attacker.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from aligner.errors import AlignerError
from aligner.file_limits import parse_json

_SEAL = '{{"checksum": "{}",'
# Length of the seal: the content after it is the sealed text without its opening brace.
_SEAL_LENGTH = len(_SEAL.format("0" * 16))
_CHECKSUM_BYTES = 8
# Bytes of one read; small enough to stay in the processor's cache for the checksum.
_CHUNK = 1 << 20


class DamagedError(AlignerError):
    """A file does not have the content that was written."""


class FileRecord(NamedTuple):
    """Expected size in bytes and checksum of a file."""

    size: int
    checksum: str


def compute_file_record(file: Path) -> FileRecord:
    """Compute the size and checksum of a file as it is now. Raises OSError."""
    digest = xxhash.xxh3_64()
    size = 0
    buffer = memoryview(bytearray(_CHUNK))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


def find_damage(directory: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """Compare files with their records, and return one line for each file that differs.

    Args:
        directory: Directory of the files.
        files: Expected record of each file, by its path relative to the directory.
    """
    problems = []
    for name, expected in files.items():
        try:
            actual = compute_file_record(directory / name)
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
            continue
        if actual != expected:
            problems.append(
                f"{name} is damaged: expected {expected.size} bytes with checksum"
                f" {expected.checksum}, found {actual.size} bytes with checksum {actual.checksum}"
            )
    return problems


def seal(text: str) -> str:
    """Return the text of a JSON object with the entry `checksum` inserted as its first entry.

    The checksum covers the whole text that is passed.
    """
    return _SEAL.format(xxhash.xxh3_64_hexdigest(text.encode())) + text[1:]


def unseal(text: str) -> dict[str, Any]:
    """Parse a text that `seal` returned, and return its object without the checksum.

    Raises:
        DamagedError: The text does not match its checksum.
    """
    if text != seal("{" + text[_SEAL_LENGTH:]):
        raise DamagedError("damaged: the content does not match the checksum")
    try:
        content = parse_json(text)
    except ValueError as error:
        raise DamagedError(f"damaged: not valid JSON ({error})") from error
    del content["checksum"]
    return content


def read_sealed(file: Path) -> dict[str, Any]:
    """Read a file whose text `seal` returned, and return its object without the checksum.

    Raises:
        DamagedError: The file cannot be read, or its text does not match its checksum.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"{file}: cannot be read: {error}") from error
    try:
        return unseal(text)
    except DamagedError as error:
        raise DamagedError(f"{file}: {error}") from error


def seal_bytes(content: bytes) -> bytes:
    """Return the content with its checksum, 8 bytes, in front."""
    return xxhash.xxh3_64_digest(content) + content


def read_sealed_bytes(file: Path) -> bytes:
    """Read a file that contains the result of `seal_bytes`, and return the content.

    Raises:
        OSError: The file cannot be read.
        DamagedError: The content does not match its checksum.
    """
    content = file.read_bytes()
    if seal_bytes(content[_CHECKSUM_BYTES:]) != content:
        raise DamagedError(f"{file}: damaged: the content does not match the checksum")
    return content[_CHECKSUM_BYTES:]


# Polynomial of CRC-32 in the bit-reversed form that zlib uses.
_CRC32_POLYNOMIAL = 0xEDB88320


def combine_crc32(first: int, second: int, second_length: int) -> int:
    """Return the CRC-32 of two concatenated texts from the CRC-32 of each.

    The CRC of the first text is multiplied by x^(8 n) modulo the CRC's polynomial, where n is the
    length of the second text in bytes (zlib's crc32_combine).
    """
    factor = 1 << 31  # the polynomial 1
    power = 1 << 23  # x^8
    while second_length:
        if second_length & 1:
            factor = _multiply_polynomials(power, factor)
        power = _multiply_polynomials(power, power)
        second_length >>= 1
    return _multiply_polynomials(factor, first) ^ second


def _multiply_polynomials(first: int, second: int) -> int:
    """Return the product of two polynomials over GF(2) modulo the polynomial of CRC-32; the
    highest bit is the constant term."""
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (_CRC32_POLYNOMIAL if second & 1 else 0)
    return product
