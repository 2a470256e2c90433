"""Damaged files are refused with an error that names the file, whichever byte changed."""

from __future__ import annotations

import json

import pytest

from aligner.data.checksums import (
    DamagedError,
    compute_file_record,
    find_damage,
    read_sealed,
    read_sealed_bytes,
    seal,
    seal_bytes,
)

CONTENT = {"name": "größer", "numbers": [1, 2.5, None], "nested": {"checksum": "of something else"}}


@pytest.mark.parametrize(
    ("content", "read"),
    [
        (seal(json.dumps(CONTENT, indent=1, ensure_ascii=False) + "\n").encode(), read_sealed),
        (seal_bytes(bytes(range(64))), read_sealed_bytes),
    ],
    ids=["json", "record"],
)
def test_changed_lost_or_added_byte_is_refused(tmp_path, content, read):
    file = tmp_path / "stored"
    file.write_bytes(content)
    assert read(file) in (CONTENT, bytes(range(64)))
    damaged = [
        content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
        for place in range(len(content))
    ]
    for wrong in (*damaged, content[:-1], content + b" ", content[1:], b""):
        file.write_bytes(wrong)
        with pytest.raises(DamagedError, match=r"stored: (damaged|cannot be read)"):
            read(file)


def test_sealed_object_remains_valid_json(tmp_path):
    content = json.loads(seal(json.dumps(CONTENT)))
    assert {key: content[key] for key in CONTENT} == CONTENT and next(iter(content)) == "checksum"
    with pytest.raises(DamagedError, match="none: cannot be read"):
        read_sealed(tmp_path / "none")


def test_damaged_and_missing_files_are_reported(tmp_path):
    names = ("whole", "flipped", "short", "missing")
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 300_000)  # larger than one read block
    records = {name: compute_file_record(tmp_path / name) for name in names}
    assert records["whole"].size == 1_500_000 and find_damage(tmp_path, records) == []
    content = bytearray((tmp_path / "flipped").read_bytes())
    content[1_500_000] ^= 0x40
    (tmp_path / "flipped").write_bytes(content)
    (tmp_path / "short").write_bytes(b"sho")
    (tmp_path / "missing").unlink()
    found = find_damage(tmp_path, records)
    assert found[0].startswith("flipped is damaged: expected 2100000 bytes with checksum ")
    assert found[1].startswith("short is damaged: expected 1500000 bytes with checksum ")
    assert found[2:] == ["missing cannot be read: No such file or directory"]
