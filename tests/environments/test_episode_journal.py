"""What environments have said is told again, word for word, whatever has become of the process that
was told it."""

from __future__ import annotations

import random
import re
import resource
import signal
import subprocess
import sys

import psutil
import pytest

from aligner.environments.episode_environment import Outcome
from aligner.environments.episode_journal import EpisodeJournal, digest
from aligner.errors import AlignerError
from tests.environments.conftest import ended

OUTCOMES = [
    Outcome("größer\n", 0.1 + 0.2),
    Outcome([{"role": "tool", "content": "\u2028"}], -0.0),
    Outcome("", 1e-300, True),
]
ASKED = [
    digest(asked)
    for asked in (["reset", {"b": 1, "a": [None]}, 3], ["step", "one"], ["step", "two\n"])
]


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
    for each in [journal] if in_memory else [journal, EpisodeJournal(tmp_path / "journal")]:
        assert read(each, "a") == read(each, "b") == OUTCOMES and read(each, "c") == [None] * 3
        assert each.told("a", 0, digest(["reset", {"a": [None], "b": 1}, 3])) == OUTCOMES[0]
        assert each.told("a", 0, digest(["reset", {"a": [None], "b": 1}, 4])) is None
        assert (
            each.told("a", 1, digest(["step", "two"])) is None
            and each.told("a", 3, ASKED[1]) is None
        )


def test_another_answer_takes_the_place_of_those_from_its_call_on(tmp_path):
    journal = written(tmp_path, "a", "b")
    journal.record("a", 1, digest(["step", "other"]), OUTCOMES[2])
    for each in (journal, EpisodeJournal(tmp_path)):
        assert read(each, "a") == [OUTCOMES[0], None, None] and read(each, "b") == OUTCOMES
        assert each.told("a", 1, digest(["step", "other"])) == OUTCOMES[2]
    with pytest.raises(AlignerError, match="episode a: the journal has no entry before call 3"):
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
    for each in (journal, EpisodeJournal(tmp_path)):
        assert read(each, "d") == OUTCOMES and read(each, "b") == [OUTCOMES[0], None, None]
    journal.forget("bd")
    assert file.read_bytes() == b""


def test_a_line_that_could_not_be_written_whole_is_none(tmp_path):
    file = tmp_path / "episodes.jsonl"
    journal = written(tmp_path, "a")
    size = file.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(file))):
            journal.record("b", 0, ASKED[0], OUTCOMES[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.stat().st_size == size and read(journal, "b") == [None] * 3
    journal.record("b", 0, ASKED[0], OUTCOMES[0])
    assert read(EpisodeJournal(tmp_path), "b") == [OUTCOMES[0], None, None]


def test_no_damage_makes_an_answer_wrong(tmp_path, caplog):
    file = tmp_path / "episodes.jsonl"
    written(tmp_path, "a", "b").forget(["b"])
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
        told = read(EpisodeJournal(tmp_path), "a")
        assert told == [*OUTCOMES[:whole], *[None] * (3 - whole)]
        assert file.read_bytes() == content[: starts[whole]]
        assert damaged == content[: starts[whole]] or f"{file}:{whole + 1}: " in caplog.text
    journal = EpisodeJournal(tmp_path)
    for call, (asked, outcome) in enumerate(zip(ASKED, OUTCOMES, strict=True)):
        journal.record("a", call, asked, outcome)
    assert read(EpisodeJournal(tmp_path), "a") == OUTCOMES


def test_a_pool_tells_what_its_journal_has_and_asks_an_environment_for_the_rest_alone(
    make, log, tmp_path
):
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
    # the journal keeps what is finished
    assert played(pool, ["one", "two", "three"]) == [*first, third]
    pool.finish("a")
    log.wait_for("a", "close")
    other = played(pool, ["one", "else"])
    assert other[:2] == first[:2] and other[2].observation.startswith("else: ")
    assert log.asked("a")[-3:] == ["reset", "one", "else"]


@pytest.mark.slow
def test_after_a_kill_a_new_process_goes_on_with_the_same_answers_and_nothing_of_the_old_one_is_left(
    make, log, tmp_path
):
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
    assert (
        log.asked("b")[-5:] == ["reset", "say 0", "say 1", "say 2", "say 3"]
        and log.asked("c")[-1] == "hold"
    )


def test_episodes_of_prompts_that_are_needed_no_more_are_forgotten_and_the_others_told_again(
    make, log, tmp_path
):
    def played(pool):
        for name in names:
            pool.reset(name, {"name": name}, 7).result()
            pool.finish(name)

    names, pool = ["8/0", "9/0", "10/0/2"], make(journal=EpisodeJournal(tmp_path / "journal"))
    played(pool)
    pool.forget(lambda name: int(name.partition("/")[0]) < 10)
    assert EpisodeJournal(tmp_path / "journal").episodes == ["10/0/2"]
    played(pool)
    assert [log.asked(name).count("reset") for name in names] == [2, 2, 1]
