"""Tests of the live output in a notebook."""

from __future__ import annotations

import json
from pathlib import Path

from aligner.api.run_handle import is_notebook, render_notebook_output
from aligner.config.compose import compose_config, save_config
from aligner.paths import RunPaths


def test_notebook_output_escapes_markup(
    tmp_path: Path,
) -> None:
    paths = RunPaths(tmp_path)
    save_config(
        compose_config(["experiment=tiny_ppo", "run.steps=4", f"run.dir={tmp_path}"]), paths.config
    )
    printed = "\n".join([*map(str, range(30)), "<script>alert(1)</script> [red]", "step 2/4"])
    assert "step" not in render_notebook_output("first", paths, 5)["text/plain"]
    record = {"step": 2, "reward/mean": 0.25, "time/step": 3.0}
    paths.metrics.write_text(json.dumps(record) + "\n")
    shown = render_notebook_output(printed, paths, 5)
    assert shown["text/plain"].startswith("step 2/4  reward 0.250  3.00 s/step  ETA 0:00:06\n")
    assert "\n26\n" not in shown["text/plain"] and "\n27\n28\n29\n<script>" in shown["text/plain"]
    assert (
        "<script>" not in shown["text/html"]
        and "&lt;script&gt;" in shown["text/html"]
        and "[red]" in shown["text/html"]
    )


def test_script_is_not_detected_as_notebook() -> None:
    assert not is_notebook()
