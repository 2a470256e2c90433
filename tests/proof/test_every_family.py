"""`aligner prove` passes for a published model of every family, at three layouts.

After the last test, a table lists the time of each command.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from aligner.models.architectures import ARCHITECTURES
from aligner.models.hugging_face import read_config
from aligner.models.layouts import layout_problems
from aligner.proof.run_proof import parse_layout
from tests.models.published_configs import SUPPORTED

pytestmark = [pytest.mark.slow, pytest.mark.families, pytest.mark.timeout(660)]
# A command takes less than a minute of processor time, but tests share the cores.
TIMEOUT_S = 600
MODELS = (
    "Llama 3.1 8B",
    "Mistral Small 24B",
    "Mixtral 8x7B",
    "Qwen2.5 7B",
    "Qwen3 8B with YaRN, as its README recommends",
    "Qwen3 30B-A3B",
    "Qwen1.5-MoE A2.7B",
    "Qwen3-Next 80B-A3B",
    "Qwen3.5 27B, text model",
    "Qwen3.5 35B-A3B, text model",
    "SmolLM3 3B",
    "Gemma 2 9B",
    "Gemma 3 1B",
    "GLM-4 9B 0414",
    "GLM-4.5",
    "OLMo 2 7B",
    "OLMo 3 7B",
    "OLMoE 1B-7B",
    "Phi-4",
    "Granite 3.1 8B",
    "GPT-2",
    "Pythia 1.4B",
    "Seed-OSS 36B",
    "gpt-oss 20B",
    "MiniMax-M2",
    "DeepSeek-V2-Lite",
    "DeepSeek-V3",
)
# A proof uses the first three that the model supports.
LAYOUTS = (
    "pipeline=2",
    "tensor=2,sequence=true,expert=2,expert_tensor=1",
    "data=2,expert_tensor=2",
    "data=2,expert=2",
    "tensor=2,sequence=true",
    "context=2",
    "data=2",
)
Reports = dict[str, tuple[float, dict[str, Any]]]


def choose_layouts(name: str) -> list[str]:
    """Return three layouts of a published model."""
    shape = read_config(SUPPORTED[name], name)
    fitting = [text for text in LAYOUTS if not [*layout_problems("", parse_layout(text), shape)]]
    return fitting[:3]


@pytest.fixture(scope="module")
def reports(request) -> Iterator[Reports]:
    """Seconds and JSON output of the command by model, printed after the last test."""
    found: Reports = {}
    yield found
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{'aligner prove':45}  seconds  largest error / tolerance")
        for name, (seconds, report) in found.items():
            checks = [check for layout in report["layouts"] for check in layout["checks"]]
            ratios = {
                check["error"] / check["tolerance"]: check for check in checks if check["tolerance"]
            }
            worst = ratios[max(ratios)]
            print(
                f"{name:45}  {seconds:7.0f}  {worst['error']:.1e} / {worst['tolerance']:.1e}"
                f" {worst['name']} {worst['worst']}"
            )


def test_each_architecture_has_a_model():
    described = {SUPPORTED[name]["architectures"][0] for name in MODELS}
    assert described == {architecture.causal_name for architecture in ARCHITECTURES}


@pytest.mark.promise("training-equals-transformers")
@pytest.mark.parametrize("name", MODELS)
def test_family_is_proven_at_three_layouts(tmp_path, reports, name):
    (tmp_path / "config.json").write_text(json.dumps(SUPPORTED[name]))
    layouts = choose_layouts(name)
    command = [sys.executable, "-m", "aligner", "prove", str(tmp_path), "--json", "--layout"]
    start = time.monotonic()
    result = subprocess.run([*command, *layouts], capture_output=True, text=True, timeout=TIMEOUT_S)
    report = json.loads(result.stdout)
    reports[name] = time.monotonic() - start, report
    failed = [
        (layout["layout"], check, layout["causes"])
        for layout in report["layouts"]
        for check in layout["checks"]
        if not check["passed"]
    ]
    assert not failed and result.returncode == 0, result.stderr
    assert [layout["layout"] for layout in report["layouts"]] == layouts
