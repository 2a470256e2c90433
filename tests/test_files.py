from __future__ import annotations

import pytest

from aligner.files import write_file


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
