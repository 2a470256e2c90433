"""The ledger and the journal of critic updates."""

from __future__ import annotations

import numpy as np
import pytest

from aligner.errors import AlignerError
from aligner.servers.critic_client import RunId, SequenceError, UpdateJournal, UpdateLedger


def test_ledger_accepts_next_update_and_repeat_of_last():
    ledger = UpdateLedger()
    for number in range(3):
        assert not ledger.is_repeat(number)
        ledger.record(number, {"loss": float(number)})
        assert ledger.is_repeat(number)
    with pytest.raises(
        SequenceError, match=r"got 4; updates must not be skipped; allowed: 3, or 2 \(repeated\)"
    ):
        ledger.is_repeat(4)
    with pytest.raises(SequenceError, match="got 1; this update was already applied"):
        ledger.is_repeat(1)


def test_ledger_accepts_only_newest_trainer_of_its_run():
    ledger = UpdateLedger()
    for run in ("run", "run@2", "run@2"):
        ledger.check_run(RunId.parse(run))
        ledger.run = RunId.parse(run)
    with pytest.raises(
        SequenceError, match="got 'run@1', but the newer attempt 'run@2' has taken over"
    ):
        ledger.check_run(RunId("run", 1))
    with pytest.raises(SequenceError, match="got 'other@0', but this critic belongs to run 'run'"):
        ledger.check_run(RunId.parse("other"))
    assert str(ledger.run) == "run@2"


@pytest.mark.parametrize(
    ("text", "run"),
    [("a", RunId("a")), ("a@3", RunId("a", 3)), ("a@b", RunId("a@b")), ("@", RunId("@"))],
)
def test_run_id_parses_name_and_attempt(text, run):
    assert RunId.parse(text) == run


def test_saved_ledger_loads_and_damaged_one_is_refused(tmp_path):
    path = tmp_path / "ledger.json"
    ledger = UpdateLedger(RunId("run", 4), 7, {"loss": 0.1})
    ledger.save(path)
    assert UpdateLedger.load(path) == UpdateLedger(RunId("run", 0), 7, {"loss": 0.1})
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.json"]
    stored = path.read_text()
    for damage in (
        "",
        "{",
        '{"no_such_field": 1}',
        "[]",
        stored.replace("7", "6"),
        stored.replace("0.1", "0.3"),
    ):
        path.write_text(damage)
        with pytest.raises(AlignerError, match=r"cannot read.*ledger\.json"):
            UpdateLedger.load(path)


def test_flipped_bit_in_journal_is_reported(tmp_path):
    journal = UpdateJournal(tmp_path)
    journal.append(3, {"returns": np.array([0.5, 1.0], dtype=np.float32)})
    assert journal.read(3)["returns"].tolist() == [0.5, 1.0]
    file = tmp_path / "update_00000003.record"
    content = file.read_bytes()
    for place in range(len(content)):
        file.write_bytes(content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :])
        with pytest.raises(
            AlignerError, match=r"cannot read critic update 3 from .*update_00000003"
        ):
            journal.read(3)
    (tmp_path / "update_00000003_copy.record").touch()
    UpdateJournal(tmp_path).prune(4, 9)
    assert [kept.name for kept in tmp_path.iterdir()] == ["update_00000003_copy.record"]
