from __future__ import annotations

import pytest

from aligner.files import append, full_disk, write_file
from tests.small_disk import small_disk


def test_a_file_takes_the_place_of_another_and_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "a.json.tmp").write_text("what a killed writer left")
    for content in ("é", b"\x00"):
        write_file(tmp_path / "a.json", content)
        assert (tmp_path / "a.json").read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    write_file(tmp_path / "a", "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"


def test_a_full_disk_is_told_with_the_file_and_what_was_complete_stays(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        write_file(disk.directory / "manifest.json", "{}")
        append(disk.directory / "metrics.jsonl", '{"step": 1}\n')
        for fill in (write_file, append):
            with pytest.raises(OSError, match=r"No space left on device: '.*/disk/large'") as caught:
                fill(disk.directory / "large", b"\0" * 100_000)
            assert full_disk(caught.value) == (
                f"{disk.directory / 'large'}: No space left on device; make room, and go on from the last complete checkpoint"
                " with run.resume=auto"
            )
            left = (disk.directory / "large").exists()
            assert left == (fill is append)
        (disk.directory / "large").unlink()
        assert sorted(file.name for file in disk.directory.iterdir()) == ["manifest.json", "metrics.jsonl"]
        assert (disk.directory / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_any_other_error_is_not_one_of_a_full_disk(tmp_path):
    assert full_disk(ValueError("no")) is None
    with pytest.raises(FileNotFoundError) as caught:
        append(tmp_path / "gone" / "file", "text")
    assert full_disk(caught.value) is None
