"""Atomic writes of files and directories, and full disks."""

from __future__ import annotations

import pytest

from aligner.files import (
    append_to_file,
    create_directory,
    create_private_file,
    describe_full_disk,
    finish_directory,
    open_new_file,
    start_directory,
    write_file,
)
from tests.small_disk import small_disk


def test_write_file_leaves_no_temporary_file(tmp_path):
    (tmp_path / "a.json.tmp").write_text("what a killed writer left")
    for content in ("é", b"\x00"):
        write_file(tmp_path / "a.json", content)
        assert (tmp_path / "a.json").read_bytes() == (
            content.encode() if isinstance(content, str) else content
        )
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    write_file(tmp_path / "a", "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"


def test_full_disk_error_keeps_complete_files(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        write_file(disk.directory / "manifest.json", "{}")
        append_to_file(disk.directory / "metrics.jsonl", '{"step": 1}\n')
        for fill in (write_file, append_to_file):
            with pytest.raises(
                OSError, match=r"No space left on device: '.*/disk/large'"
            ) as caught:
                fill(disk.directory / "large", b"\0" * 100_000)
            assert (
                describe_full_disk(caught.value)
                == f"{disk.directory / 'large'}: No space left on device; free disk space, and resume"
                " from the latest complete checkpoint with run.resume=auto"
            )
            left = (disk.directory / "large").exists()
            assert left == (fill is append_to_file)
        (disk.directory / "large").unlink()
        assert sorted(file.name for file in disk.directory.iterdir()) == [
            "manifest.json",
            "metrics.jsonl",
        ]
        assert (disk.directory / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_other_errors_are_not_reported_as_full_disk(tmp_path):
    assert describe_full_disk(ValueError("no")) is None
    with pytest.raises(FileNotFoundError) as caught:
        append_to_file(tmp_path / "gone" / "file", "text")
    assert describe_full_disk(caught.value) is None


def test_new_file_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "a.jsonl"
    with open_new_file(path) as file:
        file.write(b"one\n")
        assert not path.exists()
        file.write(b"two\n")
    with pytest.raises(ValueError), open_new_file(path) as file:
        file.write(b"half")
        raise ValueError
    assert path.read_text() == "one\ntwo\n" and [*tmp_path.iterdir()] == [path]


def test_existing_private_file_is_not_replaced(tmp_path):
    for content in ("first", "second"):
        create_private_file(tmp_path / "key", content)
    assert [*tmp_path.iterdir()] == [tmp_path / "key"] and (tmp_path / "key").read_text() == "first"
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_new_directory_appears_when_it_is_complete(tmp_path):
    with create_directory(tmp_path / "new" / "model") as directory:
        (directory / "a").write_text("first")
        assert [*(tmp_path / "new").iterdir()] == [directory]
    with (
        pytest.raises(FileExistsError, match="another process has created it"),
        create_directory(tmp_path / "new" / "model") as directory,
    ):
        (directory / "a").write_text("second")
    with pytest.raises(ValueError), create_directory(tmp_path / "new" / "other"):
        raise ValueError
    assert [*(tmp_path / "new").iterdir()] == [tmp_path / "new" / "model"]
    assert (tmp_path / "new" / "model" / "a").read_text() == "first"


def test_finished_directory_replaces_an_older_one(tmp_path):
    for content in ("old", "new"):
        left = start_directory(tmp_path / "part")
        (left / "what a killed one left").touch()
        started = start_directory(tmp_path / "part")
        with pytest.raises(FileNotFoundError):
            (left / "what one that was stopped writes later").touch()
        (started / "a").write_text(content)
        finish_directory(started, tmp_path / "part")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == [
        "part",
        "part/a",
    ]
    assert (tmp_path / "part" / "a").read_text() == "new"
