"""What environments have said is told again, word for word, whatever has become of the process that was told it."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys

import psutil
import pytest

from aligner.environments.episode_environment import Outcome
from aligner.environments.episode_journal import EpisodeJournal
from aligner.errors import AlignerError
from tests.environments.conftest import ended

OUTCOMES = [Outcome("größer\n", 0.1 + 0.2), Outcome([{"role": "tool", "content": "\u2028"}], -0.0), Outcome("", 1e-300, True)]
ASKED = [["reset", {"b": 1, "a": [None]}, 3], ["step", "one"], ["step", "two\n"]]


def written(directory, *episodes):
    journal = EpisodeJournal(directory)
    for episode in episodes:
        for call, (asked, outcome) in enumerate(zip(ASKED, OUTCOMES, strict=True)):
            journal.record(episode, call, asked, outcome)
    return journal


def read(journal, episode):
    return [journal.told(episode, call, asked) for call, asked in enumerate(ASKED)]


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_was_recorded_is_told_to_who_asks_the_same(tmp_path, in_memory):
    journal = written(None if in_memory else tmp_path / "journal", "a", "b")
    for journal in [journal] if in_memory else [journal, EpisodeJournal(tmp_path / "journal")]:
        assert read(journal, "a") == read(journal, "b") == OUTCOMES and read(journal, "c") == [None] * 3
        assert journal.told("a", 0, ["reset", {"a": [None], "b": 1}, 3]) == OUTCOMES[0]
        assert journal.told("a", 0, ["reset", {"a": [None], "b": 1}, 4]) is None
        assert journal.told("a", 1, ["step", "two"]) is None and journal.told("a", 3, ASKED[1]) is None


def test_another_answer_takes_the_place_of_those_from_its_call_on(tmp_path):
    journal = written(tmp_path, "a", "b")
    journal.record("a", 1, ["step", "other"], OUTCOMES[2])
    for journal in (journal, EpisodeJournal(tmp_path)):
        assert read(journal, "a") == [OUTCOMES[0], None, None] and read(journal, "b") == OUTCOMES
        assert journal.told("a", 1, ["step", "other"]) == OUTCOMES[2]
    with pytest.raises(AlignerError, match="episode a: call 3 follows none"):
        journal.record("a", 3, ASKED[1], OUTCOMES[1])


def test_what_is_forgotten_leaves_the_file_once_it_is_half_of_it(tmp_path):
    file = tmp_path / "episodes.jsonl"
    journal = written(tmp_path, *"abcd")
    whole = file.stat().st_size
    journal.forget(["a", "nobody"])
    assert file.stat().st_size > whole and read(EpisodeJournal(tmp_path), "a") == [None] * 3
    journal.forget(["b", "c"])
    assert file.stat().st_size == whole // 4 and [*tmp_path.iterdir()] == [file]
    journal.record("b", 0, ASKED[0], OUTCOMES[0])
    for journal in (journal, EpisodeJournal(tmp_path)):
        assert read(journal, "d") == OUTCOMES and read(journal, "b") == [OUTCOMES[0], None, None]
    journal.forget("bd")
    assert file.read_bytes() == b""


def test_no_damage_makes_an_answer_wrong(tmp_path, caplog):
    file = tmp_path / "episodes.jsonl"
    written(tmp_path, "a", "b").forget(["b"])
    content = file.read_bytes()
    starts = [0, *(found.end() for found in re.finditer(rb"\n", content))]
    draws = random.Random(5)
    places = [0, 1, *starts[1:-1], *(start - 1 for start in starts[1:]), *draws.sample(range(len(content)), 60)]
    damages = [content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :] for place in places]
    cuts = [
        content[:place] for place in (1, *starts[1:], *(start - 1 for start in starts[1:]), *draws.sample(range(9999), 30))
    ]
    for damaged in [*damages, *cuts, content[: starts[2]] + b"\xff\0{}\n[]\n\n" + content[starts[2] :], b"\n" + content]:
        file.write_bytes(damaged)
        caplog.clear()
        journal = EpisodeJournal(tmp_path)
        same = len([line for line in content.splitlines(True)[: damaged.count(b"\n")] if line in damaged])
        good = next(
            (n for n in range(len(starts) - 1) if damaged[starts[n] : starts[n + 1]] != content[starts[n] : starts[n + 1]]), 7
        )
        assert same >= good
        assert read(journal, "a") == [*OUTCOMES[:good], *[None] * (3 - min(good, 3))]
        assert file.read_bytes() == content[: starts[good]]
        if damaged != content[: starts[good]]:
            assert f"{file}:{good + 1}: " in caplog.text and "are dropped" in caplog.text
        for call in range(min(good, 3), 3):
            journal.record("a", call, ASKED[call], OUTCOMES[call])
        assert read(EpisodeJournal(tmp_path), "a") == OUTCOMES


def test_a_pool_tells_what_its_journal_has_and_asks_an_environment_for_the_rest_alone(make, log, tmp_path):
    def played(pool, actions):
        told = [pool.reset("a", {"name": "a"}, 7).result()]
        return told + [pool.step("a", action).result() for action in actions]

    first = played(make(journal=EpisodeJournal(tmp_path / "journal")), ["one", "two"])
    assert log.asked("a") == ["reset", "one", "two"]
    pool = make(journal=EpisodeJournal(tmp_path / "journal"))
    assert played(pool, ["one", "two"]) == first and log.asked("a") == ["reset", "one", "two"]
    third = pool.step("a", "three").result()
    assert log.asked("a") == ["reset", "one", "two"] * 2 + ["three"]
    pool.finish("a")
    assert played(pool, ["one", "two", "three"]) == [*first, third]  # the journal keeps what is finished
    pool.finish("a")
    log.wait_for("a", "close")
    other = played(pool, ["one", "else"])
    assert other[:2] == first[:2] and other[2].observation.startswith("else: ")
    assert log.asked("a")[-3:] == ["reset", "one", "else"]


def test_after_a_kill_a_new_process_goes_on_with_the_same_answers_and_nothing_of_the_old_one_is_left(make, log, tmp_path):
    command = [sys.executable, "-m", "tests.environments.acting", str(tmp_path), "3"]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        told = [holder.stdout.readline().strip() for _ in range(12)]
        assert holder.stdout.readline() == "held\n"
        pids = log.pids()
        assert len(pids) >= 3 and all(map(psutil.pid_exists, pids))
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert ended(pids)
    before = log.lines()
    journal = EpisodeJournal(tmp_path / "journal")
    pool = make(workers=2, journal=journal)
    again = [pool.reset(name, {"name": name}, seed).result() for seed, name in enumerate("abc")]
    again += [pool.step(name, f"say {step}").result() for step in range(3) for name in "abc"]
    assert [str(answer) for answer in again] == told and log.lines() == before
    assert pool.step("b", "say 3").result().observation.startswith("say 3: ")
    assert log.asked("b")[-5:] == ["reset", "say 0", "say 1", "say 2", "say 3"] and log.asked("c")[-1] == "hold"
