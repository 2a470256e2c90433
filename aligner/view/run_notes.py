"""Notes and tags that users give to runs: the file `notes.json` in the run directory."""

import json
from dataclasses import dataclass
from pathlib import Path

from aligner.errors import AlignerError
from aligner.file_limits import parse_json
from aligner.files import convert_write_errors, open_new_file

MAX_NOTE_LENGTH = 20_000
"""Maximum length of a note in characters."""
MAX_TAGS = 20
"""Maximum number of tags of a run."""
MAX_TAG_LENGTH = 40
"""Maximum length of a tag in characters."""


@dataclass(frozen=True)
class RunNotes:
    """Note and tags of a run."""

    note: str = ""
    tags: tuple[str, ...] = ()


def read_notes(file: Path) -> RunNotes:
    """Return the note and the tags of a run; empty if the file does not exist.

    Args:
        file: The file `notes.json` of the run.

    Raises:
        AlignerError: The file is damaged.
    """
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
        return RunNotes(str(values["note"]), tuple(str(tag) for tag in values["tags"]))
    except FileNotFoundError:
        return RunNotes()
    except (ValueError, LookupError, TypeError) as error:
        raise AlignerError(
            f'{file}: must be JSON with "note" and "tags", got: {error}; save the notes on the'
            " run's page, which replaces the file, or delete it"
        ) from error


def write_notes(file: Path, notes: RunNotes) -> None:
    """Write the note and the tags of a run, atomically.

    Raises:
        ConfigError: The file cannot be written.
    """
    values = {"note": notes.note, "tags": list(notes.tags)}
    # Two viewers may write the file at the same time.
    with convert_write_errors(file), open_new_file(file) as content:
        content.write((json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode())


def parse_notes(note: str, tags: str) -> RunNotes:
    """Return the note and the tags of a form.

    Args:
        note: The note.
        tags: The tags, separated by commas or line breaks.

    Raises:
        AlignerError: A text is too long, or there are too many tags.
    """
    names = [" ".join(tag.split()) for tag in tags.replace("\n", ",").split(",")]
    distinct_tags = tuple(dict.fromkeys(name for name in names if name))
    text = note.replace("\r\n", "\n").strip()
    if len(text) > MAX_NOTE_LENGTH:
        raise AlignerError(
            f"note: has {len(text)} characters, must have at most {MAX_NOTE_LENGTH}; shorten it"
        )
    if len(distinct_tags) > MAX_TAGS:
        raise AlignerError(
            f"tags: got {len(distinct_tags)} tags, must be at most {MAX_TAGS}; remove some"
        )
    for tag in distinct_tags:
        if len(tag) > MAX_TAG_LENGTH:
            raise AlignerError(
                f"tags: {tag[:MAX_TAG_LENGTH]}… has {len(tag)} characters, must have at most"
                f" {MAX_TAG_LENGTH}; shorten it"
            )
    return RunNotes(text, distinct_tags)
