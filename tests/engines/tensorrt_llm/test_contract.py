"""The TensorRT-LLM contract: the fake enforces it, and an installed package matches it."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import inspect
import pickle
from base64 import b64encode
from importlib import import_module
from pathlib import Path

import pytest
import torch

from aligner.engines.tensorrt_llm import llm_arguments
from tests.engines import engines
from tests.engines.tensorrt_llm import contract
from tests.engines.tensorrt_llm.fake import installed, share_tensor, sleep_config_of

_ARGUMENTS = {"load_format": "dummy", "max_seq_len": 48}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return engines.save_tiny(tmp_path_factory.mktemp("model"), seed=0)


def run_fake(directory: Path, work, **more):
    """Run `work(package, llm)` with a FakeLLM that is set up."""

    async def main(package):
        worker = "aligner.engines.tensorrt_llm.worker.AlignerWorker"
        llm = package.AsyncLLM(
            model=str(directory), ray_worker_extension_cls=worker, **_ARGUMENTS, **more
        )
        await llm.setup_async()
        return await work(package, llm)

    with installed():
        return asyncio.run(main(import_module("tensorrt_llm")))


def handles(directory: Path, uuid: str = "CPU-0") -> dict[str, str]:
    entries = [
        (name, share_tensor(tensor)) for name, tensor in engines.file_tensors(directory).items()
    ]
    return {uuid: b64encode(pickle.dumps(entries)).decode()}


def test_fake_generates_after_complete_update(directory):
    async def work(package, llm):
        await llm.update_weights(handles(directory))
        await llm.collective_rpc("update_weights", args=(None,))
        params = package.SamplingParams(max_tokens=3, top_k=1)
        return (await llm.generate_async([5, 6], params)).outputs[0].token_ids

    model = engines.reference_model(directory)
    assert run_fake(directory, work) == engines.greedy(model, torch.tensor([5, 6]), 3)


async def _no_end(package, llm, directory):
    await llm.update_weights(handles(directory))
    llm.generate_async([5], package.SamplingParams(max_tokens=1))


async def _other_gpu(package, llm, directory):
    await llm.update_weights(handles(directory, "GPU-9"))


async def _asleep(package, llm, directory):
    await llm.update_weights(handles(directory))
    await llm.update_weights(None)
    await llm.release(["kv_cache"])
    llm.generate_async([5], package.SamplingParams(max_tokens=1))


async def _unknown_tag(package, llm, directory):
    await llm.release(["weights"])


async def _unknown_keyword(package, llm, directory):
    llm.generate_async([5], package.SamplingParams(max_tokens=1), priority=1)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (_no_end, "an update without its end: True"),
        (_other_gpu, "Device UUID CPU-0 not found"),
        (_asleep, "asleep: {'kv_cache'}"),
        (_unknown_tag, "tags"),
        (_unknown_keyword, "unexpected keyword argument 'priority'"),
    ],
)
def test_fake_refuses_misuse(directory, misuse, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        run_fake(
            directory,
            lambda package, llm: misuse(package, llm, directory),
            sleep_config=sleep_config_of("1.4")(),
        )


@pytest.mark.parametrize(
    "arguments",
    [{"top_k": -1}, {"n": 2}, {"temperature": -1.0}, {"max_new_tokens": 5}, {"top_p": 2.0}],
    ids=str,
)
def test_fake_refuses_invalid_sampling_params(arguments):
    with (
        installed(),
        pytest.raises(ValueError, match=r"top_k|greedy|temperature|max_new_tokens|top_p"),
    ):
        import_module("tensorrt_llm").SamplingParams(**arguments)


@pytest.mark.parametrize(
    ("release", "unknown"),
    [("1.2", "sleep_config"), ("1.3", "enable_sleep"), ("1.4", "sampler_type")],
)
def test_fake_refuses_keyword_of_other_release(directory, release, unknown):
    with (
        installed(release),
        pytest.raises(ValueError, match=f"unexpected keyword argument '{unknown}'"),
    ):
        import_module("tensorrt_llm").AsyncLLM(model=str(directory), **{unknown: None})


@pytest.mark.parametrize("release", contract.VERSIONS)
def test_detection_finds_keywords_and_tags_of_release(release):
    with installed(release):
        accepted = llm_arguments.get_llm_keywords()
        assert accepted >= set(contract.symbol("tensorrt_llm.AsyncLLM").keywords(release))
        assert ("sleep_config" in accepted) == (release != "1.2")
        model, cache = llm_arguments.get_memory_tags()
        assert cache == ("kv_cache",)
        assert ("model_weights" in model) == (release != "1.2")
        assert not any(tag.startswith("_") for tag in model)


def drift(entry: contract.Symbol, release: str) -> list[str]:
    """Return the differences between the importable package and the table."""
    found = llm_arguments.find_object(entry.path)
    if found is None:
        return [f"there is no {entry.path}"]
    if entry.members is not None:
        values = {member.name: member.value for member in found}
        return [
            f"{entry.path}.{name} is {values.get(name)!r}, not {value!r}"
            for name, value in entry.members.items()
            if values.get(name) != value
        ]
    if not entry.parameters:
        return []
    accepted = llm_arguments.get_keywords(
        found, llm_arguments.find_object(entry.fields) if entry.fields else None
    )
    problems = []
    for name, parameter in entry.keywords(release).items():
        if name not in accepted:
            problems.append(f"{entry.path} has no {name}")
        elif parameter.default == contract.REQUIRED:
            if accepted[name] is not inspect.Parameter.empty:
                problems.append(f"{entry.path}: {name} has become optional")
        elif parameter.default != contract.UNCOMPARED and accepted[name] != parameter.default:
            problems.append(
                f"{entry.path}: {name} is {accepted[name]!r} by default, not {parameter.default!r}"
            )
    return problems


@pytest.mark.promise("tensorrt-llm-contract")
@pytest.mark.parametrize("release", contract.VERSIONS)
def test_fake_has_every_contract_symbol(release):
    with installed(release):
        entries = [entry for entry in contract.SYMBOLS if release in entry.versions]
        assert [
            problem
            for entry in entries
            for problem in drift(entry, release)
            if "there is no" in problem or entry.members
        ] == []


@pytest.mark.promise("tensorrt-llm-contract")
def test_contract_drift_is_reported():
    path = "tensorrt_llm.llmapi.KvCacheConfig"
    changed = dataclasses.replace(
        contract.symbol(path),
        parameters=(
            contract.Parameter("max_tokens", 7),
            contract.Parameter("enable_block_reuse", contract.REQUIRED),
            contract.Parameter("blocks"),
        ),
    )
    with installed():
        assert drift(contract.symbol(path), "1.4") == []
        assert drift(contract.symbol("tensorrt_llm.AsyncLLM"), "1.4") == []
        assert drift(changed, "1.4") == [
            f"{path}: max_tokens is None by default, not 7",
            f"{path}: enable_block_reuse has become optional",
            f"{path} has no blocks",
        ]
        gone = dataclasses.replace(changed, path="tensorrt_llm.llmapi.Cache")
        assert drift(gone, "1.4") == ["there is no tensorrt_llm.llmapi.Cache"]
        modes = contract.symbol("tensorrt_llm.sampling_params.LogprobMode")
        other = dataclasses.replace(modes, members={"RAW": "raw", "EXACT": "exact"})
        assert drift(modes, "1.4") == []
        assert drift(other, "1.4") == [f"{modes.path}.EXACT is None, not 'exact'"]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_llm") is None, reason="TensorRT-LLM is not installed"
)
@pytest.mark.parametrize("entry", contract.SYMBOLS, ids=lambda entry: entry.path)
def test_installed_package_matches_contract(entry):
    installed_release = ".".join(import_module("tensorrt_llm").__version__.split(".")[:2])
    release = installed_release if installed_release in contract.VERSIONS else contract.VERSIONS[-1]
    if release in entry.versions:
        assert drift(entry, release) == []
