"""Notes and tags of runs: forms, protection against other sites, and the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from aligner.errors import AlignerError
from aligner.view.run_notes import MAX_NOTE_LENGTH, RunNotes, parse_notes, read_notes, write_notes
from tests.view.served import Viewer, serving
from tests.view.test_view import paths_of
from tests.view.written_runs import HOSTILE, begin, end, write_metrics


@pytest.fixture
def viewer(tmp_path: Path) -> Iterator[Viewer]:
    for name in ("first", "second"):
        paths = begin(tmp_path / name, "experiment=tiny_ppo", name=name)
        write_metrics(paths, ["reward/mean"], steps=2)
        end(paths)
    with serving(tmp_path) as viewer:
        viewer.open()
        yield viewer


def test_saved_notes_are_shown_and_tags_are_searchable(viewer: Viewer, tmp_path: Path) -> None:
    run = paths_of(viewer.get("/"))["first"]
    answer = viewer.post(
        f"{run}/notes", {"note": "better\r\nprompt", "tags": "base line, math,math"}
    )
    assert (answer.status, answer.headers["location"]) == (303, run)
    saved = json.loads((tmp_path / "first" / "notes.json").read_text())
    assert saved == {"note": "better\nprompt", "tags": ["base line", "math"]}
    assert "better\nprompt</textarea>" in viewer.get(run).text
    assert list(paths_of(viewer.get("/?q=base+line"))) == ["first"]
    assert viewer.post(f"{run}/notes", {"note": "", "tags": ""}).status == 303
    assert "Add a note or tags" in viewer.get(run).text


@pytest.mark.promise("viewer-refuses-other-sites")
def test_notes_are_refused_from_other_sites(viewer: Viewer, tmp_path: Path) -> None:
    path = f"{paths_of(viewer.get('/'))['first']}/notes"
    fields = {"note": "evil", "tags": ""}
    # Another server on this machine is the same site for the browser's cookies.
    for origin in ("http://127.0.0.1:1", "http://evil.example", "null", ""):
        assert viewer.post(path, fields, Origin=origin).status == 403
    assert Viewer(viewer.link).post(path, fields).status == 403  # without the key
    assert viewer.get(path).status == 405
    assert not (tmp_path / "first" / "notes.json").exists()


def test_invalid_form_is_refused_and_changes_nothing(viewer: Viewer, tmp_path: Path) -> None:
    path = f"{paths_of(viewer.get('/'))['first']}/notes"
    assert viewer.post(path, {"note": "without tags"}).status == 400
    answer = viewer.post(path, {"note": "x" * (MAX_NOTE_LENGTH + 1), "tags": ""})
    assert answer.status == 400 and "must have at most 20000" in answer.text
    assert viewer.post(path, {"note": "x" * 300_000, "tags": ""}).status == 413
    assert viewer.post("/runs/none/notes", {"note": "", "tags": ""}).status == 404
    assert not (tmp_path / "first" / "notes.json").exists()


def test_notes_are_escaped(viewer: Viewer) -> None:
    run = paths_of(viewer.get("/"))["second"]
    viewer.post(f"{run}/notes", {"note": HOSTILE, "tags": "<img src=x>"})
    for path in ("/", run):
        page = viewer.get(path).text
        assert "<script>alert" not in page and "<img" not in page
        assert not set("\x00\x1b\u202e") & set(page)
    assert "<img src=x>" in unescape(viewer.get("/").text)


def test_damaged_notes_are_reported_and_can_be_replaced(viewer: Viewer, tmp_path: Path) -> None:
    run = paths_of(viewer.get("/"))["first"]
    (tmp_path / "first" / "notes.json").write_text('{"note": 1')
    assert "notes.json: must be JSON" in viewer.get("/").text
    assert viewer.post(f"{run}/notes", {"note": "again", "tags": ""}).status == 303
    assert "again" in viewer.get("/").text and "must be JSON" not in viewer.get("/").text


def test_notes_are_written_without_leftovers(tmp_path: Path) -> None:
    file = tmp_path / "notes.json"
    assert read_notes(file) == RunNotes()
    notes = RunNotes("good \u2713", ("a", "b"))
    write_notes(file, notes)
    assert read_notes(file) == notes
    assert [path.name for path in tmp_path.iterdir()] == ["notes.json"]


@pytest.mark.parametrize("tags", ["x" * 41, ",".join(map(str, range(21)))])
def test_too_many_or_too_long_tags_are_refused(tags: str) -> None:
    with pytest.raises(AlignerError, match=r"^tags: "):
        parse_notes("", tags)
