"""The episode journal returns recorded outcomes unchanged, also after a kill or a damaged file."""

from __future__ import annotations

import random
import re
import resource
import signal
import subprocess
import sys

import psutil
import pytest

from aligner.agents.episode_environment import Outcome
from aligner.agents.episode_journal import EpisodeJournal, compute_call_digest
from aligner.errors import AlignerError
from tests.agents.conftest import have_exited

OUTCOMES = [
    Outcome("größer\n", 0.1 + 0.2),
    Outcome([{"role": "tool", "content": "\u2028"}], -0.0),
    Outcome("", 1e-300, True),
]
ASKED = [
    compute_call_digest(asked)
    for asked in (["reset", {"b": 1, "a": [None]}, 3], ["step", "one"], ["step", "two\n"])
]


def write_journal(directory, *episodes):
    journal = EpisodeJournal(directory)
    for episode in episodes:
        for call, (asked, outcome) in enumerate(zip(ASKED, OUTCOMES, strict=True)):
            journal.record(episode, call, asked, outcome)
    return journal


def read_outcomes(journal, episode):
    return [journal.find(episode, call, asked) for call, asked in enumerate(ASKED)]


@pytest.mark.parametrize("in_memory", [True, False])
def test_equal_calls_return_recorded_outcomes(tmp_path, in_memory):
    journal = write_journal(None if in_memory else tmp_path / "journal", "a", "b")
    for each in [journal] if in_memory else [journal, EpisodeJournal(tmp_path / "journal")]:
        assert (
            read_outcomes(each, "a") == read_outcomes(each, "b") == OUTCOMES
            and read_outcomes(each, "c") == [None] * 3
        )
        assert (
            each.find("a", 0, compute_call_digest(["reset", {"a": [None], "b": 1}, 3]))
            == OUTCOMES[0]
        )
        assert each.find("a", 0, compute_call_digest(["reset", {"a": [None], "b": 1}, 4])) is None
        assert (
            each.find("a", 1, compute_call_digest(["step", "two"])) is None
            and each.find("a", 3, ASKED[1]) is None
        )


def test_new_outcome_replaces_later_outcomes(tmp_path):
    journal = write_journal(tmp_path, "a", "b")
    journal.record("a", 1, compute_call_digest(["step", "other"]), OUTCOMES[2])
    for each in (journal, EpisodeJournal(tmp_path)):
        assert (
            read_outcomes(each, "a") == [OUTCOMES[0], None, None]
            and read_outcomes(each, "b") == OUTCOMES
        )
        assert each.find("a", 1, compute_call_digest(["step", "other"])) == OUTCOMES[2]
    with pytest.raises(AlignerError, match="episode a: the journal has no entry before call 3"):
        journal.record("a", 3, ASKED[1], OUTCOMES[1])


def test_journal_is_compacted_once_half_is_forgotten(tmp_path):
    file = tmp_path / "episodes.jsonl"
    journal = write_journal(tmp_path, *"abcd")
    whole = file.stat().st_size
    journal.forget(["a", "nobody"])
    assert (
        file.stat().st_size > whole and read_outcomes(EpisodeJournal(tmp_path), "a") == [None] * 3
    )
    journal.forget(["b", "c"])
    assert file.stat().st_size == whole // 4 and [*tmp_path.iterdir()] == [file]
    journal.record("b", 0, ASKED[0], OUTCOMES[0])
    for each in (journal, EpisodeJournal(tmp_path)):
        assert read_outcomes(each, "d") == OUTCOMES and read_outcomes(each, "b") == [
            OUTCOMES[0],
            None,
            None,
        ]
    journal.forget("bd")
    assert file.read_bytes() == b""


def test_partly_written_line_is_removed(tmp_path):
    file = tmp_path / "episodes.jsonl"
    journal = write_journal(tmp_path, "a")
    size = file.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(file))):
            journal.record("b", 0, ASKED[0], OUTCOMES[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.stat().st_size == size and read_outcomes(journal, "b") == [None] * 3
    journal.record("b", 0, ASKED[0], OUTCOMES[0])
    assert read_outcomes(EpisodeJournal(tmp_path), "b") == [OUTCOMES[0], None, None]


def test_journal_keeps_only_entries_before_damage(tmp_path, caplog):
    file = tmp_path / "episodes.jsonl"
    write_journal(tmp_path, "a", "b").forget(["b"])
    content = file.read_bytes()
    starts = [0, *(found.end() for found in re.finditer(b"\n", content))]
    edges = [place for start in starts[1:-1] for place in (start - 1, start)]
    places = [0, 1, *edges, len(content) - 1, *random.Random(5).sample(range(len(content)), 60)]
    flipped = [
        (content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :], at) for at in places
    ]
    cut = [(content[:at], at) for at in places]
    added = [(content[:at] + b"\xff\0{}\n[]\n\n" + content[at:], at) for at in places]
    for damaged, at in flipped + cut + added:
        file.write_bytes(damaged)
        caplog.clear()
        whole = sum(end <= at for end in starts[1:])  # lines before the damage
        outcomes = read_outcomes(EpisodeJournal(tmp_path), "a")
        assert outcomes == [*OUTCOMES[:whole], *[None] * (3 - whole)]
        assert file.read_bytes() == content[: starts[whole]]
        assert damaged == content[: starts[whole]] or f"{file}:{whole + 1}: " in caplog.text
    journal = EpisodeJournal(tmp_path)
    for call, (asked, outcome) in enumerate(zip(ASKED, OUTCOMES, strict=True)):
        journal.record("a", call, asked, outcome)
    assert read_outcomes(EpisodeJournal(tmp_path), "a") == OUTCOMES


def test_pool_returns_outcomes_of_its_journal(make, log, tmp_path):
    def play(pool, actions):
        outcomes = [pool.reset("a", {"name": "a"}, 7).result()]
        return outcomes + [pool.step("a", action).result() for action in actions]

    first = play(make(journal=EpisodeJournal(tmp_path / "journal")), ["one", "two"])
    assert log.calls("a") == ["reset", "one", "two"]
    pool = make(journal=EpisodeJournal(tmp_path / "journal"))
    assert play(pool, ["one", "two"]) == first and log.calls("a") == ["reset", "one", "two"]
    third = pool.step("a", "three").result()
    assert log.calls("a") == ["reset", "one", "two"] * 2 + ["three"]
    pool.finish("a")
    # The journal keeps finished episodes.
    assert play(pool, ["one", "two", "three"]) == [*first, third]
    pool.finish("a")
    log.wait_for("a", "close")
    other = play(pool, ["one", "else"])
    assert other[:2] == first[:2] and other[2].observation.startswith("else: ")
    assert log.calls("a")[-3:] == ["reset", "one", "else"]


@pytest.mark.slow
def test_episodes_of_killed_process_are_resumed(make, log, tmp_path):
    command = [sys.executable, "-m", "tests.agents.acting", str(tmp_path), "3"]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        printed_outcomes = [holder.stdout.readline().strip() for _ in range(12)]
        assert holder.stdout.readline() == "held\n"
        pids = log.pids()
        assert len(pids) >= 3 and all(map(psutil.pid_exists, pids))
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert have_exited(pids)
    before = log.lines()
    journal = EpisodeJournal(tmp_path / "journal")
    pool = make(workers=2, journal=journal)
    again = [pool.reset(name, {"name": name}, seed).result() for seed, name in enumerate("abc")]
    again += [pool.step(name, f"say {step}").result() for step in range(3) for name in "abc"]
    assert [str(answer) for answer in again] == printed_outcomes and log.lines() == before
    assert pool.step("b", "say 3").result().observation.startswith("say 3: ")
    assert (
        log.calls("b")[-5:] == ["reset", "say 0", "say 1", "say 2", "say 3"]
        and log.calls("c")[-1] == "hold"
    )


def test_only_forgotten_episodes_are_reset_again(make, log, tmp_path):
    def play(pool):
        for name in names:
            pool.reset(name, {"name": name}, 7).result()
            pool.finish(name)

    names, pool = ["8/0", "9/0", "10/0/2"], make(journal=EpisodeJournal(tmp_path / "journal"))
    play(pool)
    pool.forget(lambda name: int(name.partition("/")[0]) < 10)
    assert EpisodeJournal(tmp_path / "journal").episodes == ["10/0/2"]
    play(pool)
    assert [log.calls(name).count("reset") for name in names] == [2, 2, 1]
