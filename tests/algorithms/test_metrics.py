from __future__ import annotations

from aligner.algorithms.metrics import update_metrics


def test_a_steps_updates_are_means_but_maxima_and_running_counts_and_a_skipped_one_lacks_some():
    done = {"loss": 1.0, "ratio_max": 1.5, "skipped": 0.0, "skipped_total": 3.0}
    skipped = {"ratio_max": 1.25, "skipped": 1.0, "skipped_total": 4.0}
    expected = {"loss": 1.0, "ratio_max": 1.5, "skipped": 0.5, "skipped_total": 4.0}
    for updates in ([done, skipped], [skipped, done]):
        assert update_metrics("policy", updates) == {f"policy/{name}": value for name, value in expected.items()}
