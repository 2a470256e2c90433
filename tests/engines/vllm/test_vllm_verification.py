"""vLLM's workers prove that their parameters contain the weights of an update.

The tests damage the weights inside a worker of a real vLLM, through orders that they add to a copy of
the program.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aligner.engines.vllm import program_client
from aligner.engines.vllm.vllm_engine import VLLMEngine
from aligner.engines.weight_probe import (
    ProbeTolerance,
    build_probe,
    find_probe_problem,
    run_probe,
)
from aligner.errors import AlignerError
from tests.engines import engines
from tests.engines.vllm.shared_clients import NEEDED
from tests.megatron import families

pytestmark = [
    *NEEDED,
    pytest.mark.timeout(600),
    pytest.mark.promise("weight-sync-is-verified"),
]

WORKER_CODE = '''

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import layerwise

_load_expert = RoutedExperts._load_w2
_process = UnquantizedLinearMethod.process_weights_after_loading
_restore = layerwise._copy_and_restore_kernel_tensors


def _set_fault(self, fault, layer):
    """Set the fault of the next updates, or flip a bit of a parameter at once."""
    RoutedExperts._load_w2 = _load_expert
    UnquantizedLinearMethod.process_weights_after_loading = _process
    layerwise._copy_and_restore_kernel_tensors = _restore
    model = self.weight_transfer_engine.model

    if fault == "flip":
        dict(model.named_parameters())[layer].data.view(torch.int32).view(-1)[-1] ^= 1
    elif fault == "skip_expert":
        target = [each for each in model.modules() if isinstance(each, RoutedExperts)][1]

        def skip(self, expert_data, *args, **kwargs):
            is_skipped = expert_data.storage_offset() == 2 * expert_data.numel()
            if not (self is target and is_skipped):
                _load_expert(self, expert_data, *args, **kwargs)

        RoutedExperts._load_w2 = skip
    elif fault == "corrupt":
        target = model.get_submodule(layer)

        def restore_corrupted(loaded, info):
            _restore(loaded, info)
            if loaded is target:
                loaded.weight.data[-1] += 1e-3

        layerwise._copy_and_restore_kernel_tensors = restore_corrupted
    elif fault == "stale":
        target = model.get_submodule(layer)

        def keep_old(loaded, info):
            if loaded is target:
                layerwise._place_kernel_tensors(loaded, info)
            else:
                _restore(loaded, info)

        layerwise._copy_and_restore_kernel_tensors = keep_old


AlignerWorker.set_fault = _set_fault
'''
SERVER_CODE = """
async def _set_fault(self, fault, layer):
    await self._call_workers("set_fault", fault=fault, layer=layer)


Server._set_fault = _set_fault


if __name__ == "__main__":"""


class Faulty:
    """An engine whose worker can have faults."""

    def __init__(self, engine: VLLMEngine, directory: Path) -> None:
        self.engine = engine
        self.directory = directory
        self.version = 0

    def set_fault(self, fault: str, layer: str = "") -> None:
        client: Any = self.engine._client
        order = client._program.execute("set_fault", fault=fault, layer=layer)
        client._loop.run("setting a fault", order, 60)

    def sync(self) -> list[str]:
        """Sync the weights, and return those that are wrong."""
        self.version += 1
        engines.publish(self.engine, self.directory, self.version)
        return list(self.engine.find_wrong_weights({}))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    directory = families.save(
        "qwen3_moe", tmp_path_factory.mktemp("model"), hidden_size=128, head_dim=32
    )
    program = tmp_path_factory.mktemp("program") / "program"
    shutil.copytree(program_client._PROGRAM, program)
    receive = program / "receive.py"
    receive.write_text(receive.read_text() + WORKER_CODE)
    serve = program / "serve.py"
    serve.write_text(serve.read_text().replace('if __name__ == "__main__":', SERVER_CODE))
    descriptions = program_client._ORDER_DESCRIPTIONS | {"set_fault": "set a fault"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_client, "_PROGRAM", program)
        patch.setattr(program_client, "_ORDER_DESCRIPTIONS", descriptions)
        settings = dataclasses.replace(engines.SETTINGS, kind="vllm", kv_cache_mib=64)
        engine = VLLMEngine(directory, engines.shape_of(directory), settings, 0, seed=7)
        yield Faulty(engine, directory)
        engine.shutdown()


def test_unchanged_weights_pass_every_sync(faulty):
    for _ in range(2):
        assert faulty.sync() == []
        assert faulty.engine.find_changed_weights() == []


def test_probe_equals_transformers(faulty):
    assert faulty.sync() == []
    sequences = build_probe(engines.shape_of(faulty.directory), 48, seed=3)
    result = run_probe(faulty.engine, sequences)
    model = families.load_reference(faulty.directory)
    with torch.no_grad():
        logprobs = model(sequences).logits[:, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, sequences[:, 1:, None])[..., 0]
    assert find_probe_problem(result, expected, ProbeTolerance(1e-4, False)) is None


def test_missing_expert_is_named(faulty):
    faulty.set_fault("skip_expert")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    numel = engines.file_tensors(faulty.directory)[name].numel()
    assert faulty.sync() == [f"{name} ({numel} elements were not loaded)"]
    faulty.set_fault("none")
    assert faulty.sync() == []


def test_corrupted_tensor_is_named(faulty):
    name = "model.layers.2.post_attention_layernorm"
    faulty.set_fault("corrupt", name)
    assert faulty.sync() == [f"{name}.weight (in {name}.weight)"]
    faulty.set_fault("none")
    assert faulty.sync() == []


def test_stale_tensor_is_named(faulty):
    assert faulty.sync() == []
    name = "model.layers.3.input_layernorm"
    faulty.set_fault("stale", name)
    model = families.load_reference(faulty.directory)
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(-1).contiguous()
    other = faulty.directory.parent / "other"
    model.save_pretrained(other)
    first, faulty.directory = faulty.directory, other
    try:
        assert faulty.sync() == [f"{name}.weight (in {name}.weight)"]
    finally:
        faulty.directory = first
    faulty.set_fault("none")
    assert faulty.sync() == []


def test_flipped_bit_between_syncs_is_named(faulty):
    assert faulty.sync() == []
    faulty.set_fault("flip", "model.embed_tokens.weight")
    assert faulty.engine.find_changed_weights() == ["model.embed_tokens.weight"]


def test_weights_without_verified_update_are_refused(faulty):
    assert faulty.sync() == []
    with pytest.raises(AlignerError, match="the last weight update was not recorded"):
        faulty.engine.find_wrong_weights({})
