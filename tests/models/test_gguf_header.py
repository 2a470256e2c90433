"""Headers of GGUF files with hostile counts, lengths and nesting are refused with the entry's name,
within a second and without memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from aligner.errors import ConfigError
from aligner.models.gguf_header import gguf_shape
from benchmarks.fuzz import valid_gguf

ARRAY = 9
STRING = 8
UINT32 = 4
HUGE = 2**63 - 1


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors: int, fields: int, content: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + content


def array(kind: int, count: int) -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, count)


HOSTILE = {
    "fields": (header(0, 2**40), "number of metadata entries is 1099511627776, allowed: 65536"),
    "tensors": (header(2**64 - 1, 0), "number of tensors is 18446744073709551615, allowed"),
    "string": (header(0, 1, struct.pack("<Q", HUGE)), f"length of a string is {HUGE}, allowed"),
    "text_after_end": (
        header(0, 1, text("key") + struct.pack("<I", STRING) + struct.pack("<Q", 1000)),
        "'key': needs 1000 bytes, but the file has only 0 more",
    ),
    "numbers": (
        header(0, 1, text("key") + array(UINT32, HUGE)),
        f"'key': array elements of the file is {HUGE}, allowed",
    ),
    "numbers_after_end": (
        header(0, 1, text("key") + array(UINT32, 1_000_000)),
        "'key': needs 4000000 bytes, but the file has only 0 more",
    ),
    "texts": (header(0, 1, text("key") + array(STRING, 2**40)), "array elements of the file"),
    "empty_arrays": (
        header(0, 1, text("key") + array(ARRAY, 2**22) + array(UINT32, 0)[4:] * 1000),
        "needs 4 bytes, but the file has only 0 more",
    ),
    "nesting": (
        header(0, 1, text("key") + struct.pack("<I", ARRAY) + array(ARRAY, 1)[4:] * 50_000),
        "'key': nested arrays is 5, allowed: 4",
    ),
    "type": (header(0, 1, text("key") + struct.pack("<I", 99)), "'key': value type 99 is unknown"),
    "encoding": (
        header(0, 1, struct.pack("<Q", 2) + b"\xff\xfe"),
        "'metadata entry 0': 'utf-8' codec can't decode",
    ),
    "dimensions": (
        header(1, 0, text("w") + struct.pack("<I", 2**32 - 1)),
        "number of dimensions is 4294967295, allowed: 4",
    ),
    "elements": (
        header(1, 0, text("w") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)),
        "number of elements is 1208925819614629174706176, allowed",
    ),
    "version": (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "GGUF version 99 is not supported"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_gguf_header_is_refused(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(ConfigError) as raised:
        gguf_shape(file)
    seconds = time.process_time() - begin
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(raised.value).startswith(str(file)) and message in str(raised.value)
    assert peak < 16 << 20
    assert seconds < 5


def test_valid_gguf_header_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(valid_gguf())
    shape = gguf_shape(file)
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (2, 16, 8)
    assert not shape.tied_embeddings and shape.eos_token_ids == (2,)


def test_array_in_place_of_a_number_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    number = text("llama.block_count") + struct.pack("<II", UINT32, 2)
    values = text("llama.block_count") + array(UINT32, 2) + struct.pack("<II", 1, 1)
    file.write_bytes(valid_gguf().replace(number, values))
    with pytest.raises(ConfigError, match="block_count is an array of 2 elements"):
        gguf_shape(file)
