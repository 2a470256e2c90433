"""Arguments that a configuration passes on to TensorRT-LLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aligner.checks.check import check
from aligner.checks.tensorrt_llm_arguments import find_invalid_arguments, find_refused_arguments
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.schema import TensorRTLLMConfig

# The class of arguments in the form of TensorRT-LLM's source, with a few of its fields.
_SOURCE = """
from typing import Literal, Optional, Union
from pydantic import BaseModel, Field, PrivateAttr

class StrictBaseModel(BaseModel):
    pass

class MoeConfig(StrictBaseModel):
    backend: Literal["AUTO", "CUTLASS", "TRITON"] = Field(default="AUTO")
    max_num_tokens: Optional[int] = Field(default=None)

class BaseLlmArgs(StrictBaseModel):
    trust_remote_code: bool = Field(default=False)
    _parallel_config: Optional[object] = PrivateAttr(default=None)

class TorchLlmArgs(BaseLlmArgs):
    attn_backend: str = Field(default="TRTLLM")
    moe_config: MoeConfig = Field(default_factory=MoeConfig)
    batch_wait_timeout_ms: float = Field(default=0)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory on the path with the source of TensorRT-LLM's arguments."""
    module = tmp_path / "packages" / "tensorrt_llm" / "llmapi" / "llm_args.py"
    module.parent.mkdir(parents=True)
    module.write_text(_SOURCE)
    for directory in (module.parent, module.parent.parent):
        (directory / "__init__.py").write_text("raise ImportError('no driver')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    return module


def find_invalid(**args: Any) -> list[str]:
    """Return the lines about arguments that the installed TensorRT-LLM does not accept."""
    return [*find_invalid_arguments(TensorRTLLMConfig(args=args))]


@pytest.mark.promise("tensorrt-llm-arguments-are-checked")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_batch_size", "aligner sets it; set engine.batch_size"),
        ("moe_expert_parallel_size", "aligner sets it; set engine.parallel.expert"),
        ("sleep_config", "aligner sets it; set engine.sleep"),
        ("load_format", "TensorRT-LLM reads no weights from files"),
        ("mx_server_url", "TensorRT-LLM reads no weights from files"),
        ("speculative_config", "TensorRT-LLM would sample from another distribution"),
        ("kv_connector_config", "a KV cache outside the engine would survive a weight sync"),
        ("pipeline_parallel_size", "aligner starts one worker of TensorRT-LLM for each rank"),
        ("lora_config", "a weight sync sends weights with the adapter merged; set actor.lora.rank"),
    ],
)
def test_argument_that_would_break_a_promise_is_refused(name: str, message: str) -> None:
    (problem,) = find_refused_arguments(TensorRTLLMConfig(args={name: 1}))
    assert problem.startswith(f"engine.tensorrt_llm.args.{name}: is refused, because {message}")


@pytest.mark.promise("tensorrt-llm-arguments-are-checked")
def test_argument_that_the_package_lacks_is_refused(package: Path) -> None:
    key = "engine.tensorrt_llm.args"
    assert find_invalid(attn_backend="FLASHINFER", moe_config={"backend": "CUTLASS"}) == []
    assert find_invalid(atn_backend="FLASHINFER") == [
        f"{key}.atn_backend: TensorRT-LLM has no such argument; did you mean {key}.attn_backend?"
    ]
    assert find_invalid(trust_remote_code="yes") == [
        f"{key}.trust_remote_code=yes: expected bool, got str"
    ]
    assert find_invalid(moe_config={"backend": "DEEPGEM"}) == [
        f"{key}.moe_config.backend=DEEPGEM: allowed: AUTO, CUTLASS, TRITON"
    ]
    assert find_invalid(_parallel_config=1)[0].startswith(f"{key}._parallel_config: TensorRT-LLM")
    # Another line is about refused arguments.
    assert find_invalid(max_batch_size="many") == []


def test_release_with_other_source_layout_is_refused(package: Path) -> None:
    package.write_text("class LlmArgs: ...\n")
    with pytest.raises(ConfigError, match=r"has no tensorrt_llm\.llmapi\.llm_args\.TorchLlmArgs"):
        find_invalid(attn_backend="FLASHINFER")


def test_check_of_a_cluster_job_refuses_arguments(tmp_path: Path) -> None:
    overrides = ["experiment=tiny_ppo", "engine=tensorrt_llm", "cluster=slurm"]
    overrides += ["+engine.tensorrt_llm.args.load_format=auto", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=r"args\.load_format: is refused, because TensorRT-LLM"):
        check(compose_config(overrides))
