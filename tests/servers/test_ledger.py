from __future__ import annotations

import pytest

from aligner.errors import AlignerError
from aligner.servers.ledger import SequenceError, UpdateLedger


def test_only_the_next_update_is_new_and_only_the_last_is_a_repeat():
    ledger = UpdateLedger()
    for number in range(3):
        assert not ledger.is_repeat("run", number)
        ledger.record("run", number, {"loss": float(number)})
        assert ledger.is_repeat("run", number)
    with pytest.raises(SequenceError, match="got 4, a gap; allowed: 3, or 2 again"):
        ledger.is_repeat("run", 4)
    with pytest.raises(SequenceError, match="got 1, already applied"):
        ledger.is_repeat("run", 1)
    with pytest.raises(SequenceError, match="got 'other', but this critic serves run 'run'"):
        ledger.is_repeat("other", 3)


def test_a_saved_ledger_reads_back_and_a_damaged_one_is_refused(tmp_path):
    path = tmp_path / "ledger.json"
    ledger = UpdateLedger("run", 7, {"loss": 0.1})
    ledger.save(path)
    assert UpdateLedger.load(path) == ledger
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.json"]
    for damage in ("", "{", '{"no_such_field": 1}'):
        path.write_text(damage)
        with pytest.raises(AlignerError, match=r"cannot read.*ledger\.json"):
            UpdateLedger.load(path)
