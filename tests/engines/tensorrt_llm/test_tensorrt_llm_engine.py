"""Properties of the TensorRT-LLM engine only: arguments per release, order of memory calls, failed
updates."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aligner.engines.engine_loop import SingleResponses, run_steps
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.engines.external import client
from aligner.engines.tensorrt_llm import llm_arguments
from aligner.engines.tensorrt_llm.llm_client import (
    build_worker_environment,
    parse_gpu_index,
    replace_environment,
)
from aligner.engines.tensorrt_llm.tensorrt_llm_engine import TensorRTLLMEngine
from aligner.errors import AlignerError, ConfigError
from aligner.schema import EngineConfig, EngineParallelConfig, TensorRTLLMConfig
from tests.engines import engines
from tests.engines.engines import generate, greedy, prompts, publish, requests, response, write
from tests.engines.tensorrt_llm import contract
from tests.engines.tensorrt_llm.fake import FakeLLM, installed

GREEDY = SamplingOptions(6, greedy=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return engines.save_tiny(tmp_path_factory.mktemp("model"), seed=0, kv_heads=4)


@pytest.fixture(scope="module")
def wanted(directory) -> list[list[int]]:
    model = engines.reference_model(directory)
    return [greedy(model, prompt.tokens, 6) for prompt in prompts()]


@pytest.fixture(params=contract.VERSIONS)
def release(request) -> Iterator[str]:
    with installed(request.param):
        yield request.param


@pytest.fixture
def newest() -> Iterator[None]:
    with installed():
        yield


def start(
    directory: Path, settings: EngineConfig = engines.SETTINGS, **more
) -> tuple[TensorRTLLMEngine, FakeLLM]:
    options = {"device": "cpu", "dtype": torch.float32} | more
    engine = TensorRTLLMEngine(directory, engines.shape_of(directory), settings, 0, 7, **options)
    return engine, FakeLLM.made[-1]


def texts(engine: TensorRTLLMEngine, options: SamplingOptions = GREEDY) -> list[list[int]]:
    return [response(sample) for sample in generate(engine, requests(), options)]


def test_trainer_cache_is_emptied_before_engine_resumes(release, directory, monkeypatch):
    engine, llm = start(directory)
    publish(engine, directory, 0)
    engine.sleep()
    order, resume = [], llm.resume

    async def resumed(tags):
        order.append("resume")
        await resume(tags)

    monkeypatch.setattr(llm, "resume", resumed)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("give back"))
    engine.wake()
    publish(engine, directory, 1)
    assert order == ["give back", "resume"] * 2, "for the model, then for keys and values"


@pytest.mark.promise("tensorrt-llm-arguments-are-checked")
def test_passed_arguments_reach_tensorrt_llm(newest, directory):
    passed = {"trust_remote_code": True}
    settings = dataclasses.replace(
        engines.SETTINGS,
        tensorrt_llm=dataclasses.replace(engines.SETTINGS.tensorrt_llm, args=passed),
    )
    _, llm = start(directory, settings)
    assert llm.arguments["trust_remote_code"] is True


@pytest.mark.parametrize(("expert", "sizes"), [(1, (None, None)), (2, (2, 2)), (4, (4, 1))])
def test_expert_parallelism_divides_the_tensor_ranks(newest, directory, expert, sizes):
    keywords = llm_arguments.get_llm_keywords()
    arguments = llm_arguments.build_llm_arguments(
        keywords,
        llm_arguments.get_sampling_keywords(),
        directory,
        engines.shape_of(directory),
        dataclasses.replace(
            engines.SETTINGS, parallel=EngineParallelConfig(tensor=4, expert=expert)
        ),
        torch.bfloat16,
    )
    names = ("moe_expert_parallel_size", "moe_tensor_parallel_size")
    assert tuple(arguments.get(name) for name in names) == sizes


def test_llm_arguments_match_release(release, directory, wanted):
    settings = dataclasses.replace(
        engines.SETTINGS, cuda_graphs=True, kv_cache_mib=1, batch_size=24
    )
    engine, llm = start(directory, settings, max_sequence_length=40)
    given = llm.arguments
    assert ("enable_sleep" in given) == (release == "1.2")
    assert ("sleep_config" in given) == (release != "1.2")
    assert given["enable_sleep" if release == "1.2" else "sleep_config"]
    # The other samplers of release 1.3 are deprecated, and 1.4 refuses the keyword.
    assert given.get("sampler_type") == ("TRTLLMSampler" if release == "1.2" else None)
    assert (given["load_format"], given["tensor_parallel_size"], given["dtype"]) == (
        "dummy",
        1,
        "float32",
    )
    assert (given["max_seq_len"], given["max_batch_size"]) == (40, 24)
    assert given["cuda_graph_config"].max_batch_size == 24
    # Bytes per token: 2 (key, value) x 2 layers x 4 heads x 8 dimensions x 4 bytes.
    assert given["kv_cache_config"].max_tokens == (1 << 20) // 512
    publish(engine, directory, 0)
    assert texts(engine) == wanted
    engine.sleep()
    engine.wake()
    publish(engine, directory, 1)
    assert texts(engine) == wanted
    engine.shutdown()


@pytest.mark.usefixtures("newest")
def test_kv_cache_default_is_memory_share_without_sleep(
    directory,
):
    engine, llm = start(directory, dataclasses.replace(engines.SETTINGS, sleep=False))
    cache = llm.arguments["kv_cache_config"]
    assert (cache.max_tokens, cache.free_gpu_memory_fraction) == (None, 0.4)
    assert llm.arguments["sleep_config"] is None
    assert llm.arguments["cuda_graph_config"] is None
    with pytest.raises(
        AlignerError,
        match=r"engine\.sleep=false: .* only if it was started with engine\.sleep=true",
    ):
        engine.sleep()
    engine.shutdown()


def test_unsupported_argument_is_omitted_or_reported():
    wanted = {"model": "m", "load_format": "dummy", "sampler_type": "TRTLLMSampler"}
    known = llm_arguments.select_accepted(
        "AsyncLLM", wanted, {"model", "load_format"}, optional_keywords=("sampler_type",)
    )
    assert known == {"model": "m", "load_format": "dummy"}
    with pytest.raises(
        AlignerError, match="this TensorRT-LLM release's AsyncLLM does not accept load_format"
    ):
        llm_arguments.select_accepted(
            "AsyncLLM", wanted, {"model"}, optional_keywords=("sampler_type",)
        )
    with pytest.raises(AlignerError, match=r"set engine\.sleep=false"):
        llm_arguments.build_sleep_arguments({"model"})


def test_sleeping_engine_keeps_no_copy_of_weights(release, directory):
    engine, llm = start(directory)
    publish(engine, directory, 0)
    engine.sleep()
    weights = {"model"} if release == "1.2" else {"model_weights"}
    assert weights <= llm.released
    # Release 1.2 cannot discard them.
    assert (weights <= llm.backed_up) == (release == "1.2")
    assert "model_extra" in llm.backed_up
    assert "kv_cache" not in llm.backed_up
    engine.shutdown()


@pytest.mark.parametrize("state", contract.WEIGHT_UPDATES)
@pytest.mark.parametrize("failure", ["bucket", "end"])
def test_retry_after_failed_update_succeeds(directory, wanted, state, failure):
    version = state if state in contract.VERSIONS else "1.4"
    with installed(version, state):
        engine, llm = start(directory)
        publish(engine, directory, 0)
        if failure == "bucket":
            llm.broken_worker = 0
        else:
            llm.worker_broken_at_end = 0
        update = engine.begin_update(1)
        with pytest.raises(AlignerError, match="RuntimeError: out of memory"):
            write(engine, update, directory)
            update.commit()
        update.abort()
        llm.broken_worker = llm.worker_broken_at_end = None
        publish(engine, directory, 2)
        assert texts(engine) == wanted
        engine.shutdown()


@pytest.mark.parametrize("state", contract.WEIGHT_UPDATES)
def test_update_after_aborted_one_loads_all_weights(directory, wanted, state):
    version = state if state in contract.VERSIONS else "1.4"
    with installed(version, state):
        engine, llm = start(directory)
        update = engine.begin_update(0)
        write(engine, update, directory)
        assert llm.updating
        update.abort()
        publish(engine, directory, 1)
        assert texts(engine) == wanted
        engine.shutdown()


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        (SamplingOptions(2), "raw"),
        (SamplingOptions(2, top_p=0.5), "raw"),
        (SamplingOptions(2, temperature=0.7), "processed"),
        (SamplingOptions(2, temperature=0.7, greedy=True), "raw"),
    ],
    ids=["temperature 1", "top_p", "temperature", "greedy"],
)
def test_logprobs_mode_depends_on_temperature(release, directory, monkeypatch, options, mode):
    engine, llm = start(directory)
    publish(engine, directory, 0)
    modes, draw = set(), llm.draw

    def record(sequence, params, generator):
        modes.add(getattr(params, "logprobs_mode", None))
        return draw(sequence, params, generator)

    monkeypatch.setattr(llm, "draw", record)
    generate(engine, requests(), options)
    (found,) = modes
    assert (found and found.value) == (None if release == "1.2" else mode)
    engine.shutdown()


@pytest.mark.usefixtures("newest")
def test_logprobs_at_temperature_equal_full_distribution(directory):
    engine, _ = start(directory)
    publish(engine, directory, 0)
    model = engines.reference_model(directory)
    for sample in generate(engine, requests(2), SamplingOptions(8, temperature=0.7)):
        torch.testing.assert_close(
            sample.engine_logprobs,
            engines.whole_logprobs(model, sample, 0.7),
            atol=1e-4,
            rtol=0,
        )
    engine.shutdown()


def test_missing_package_error_names_docs(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(
        AlignerError, match=r"TensorRT-LLM cannot be imported .* docs/tensorrt_llm\.md"
    ):
        start(directory)


@pytest.mark.usefixtures("newest")
def test_kv_cache_below_longest_sequence_is_refused(directory):
    shape = dataclasses.replace(engines.shape_of(directory), max_positions=4096)
    with pytest.raises(
        ConfigError,
        match=r"engine\.kv_cache_mib=1: has room for 2048 tokens, .* has 4096 tokens .*; must be at least 2",
    ):
        TensorRTLLMEngine(
            directory,
            shape,
            dataclasses.replace(engines.SETTINGS, kv_cache_mib=1),
            0,
            7,
            device="cpu",
            dtype=torch.float32,
        )


@pytest.mark.usefixtures("newest")
def test_prompt_length_is_limited_only_by_sequence_length(directory):
    """TensorRT-LLM limits prompts to 1024 tokens by default, whatever its sequence limit is."""
    shape = dataclasses.replace(engines.shape_of(directory), max_positions=4096)
    engine = TensorRTLLMEngine(
        directory, shape, engines.SETTINGS, 0, 7, device="cpu", dtype=torch.float32
    )
    publish(engine, directory, 0)
    prompt = dataclasses.replace(prompts()[0], tokens=torch.arange(1100) % shape.vocab_size)
    (sample,) = generate(engine, [GenerationRequest(prompt, 0)], GREEDY)
    assert len(response(sample)) == 6


@pytest.mark.usefixtures("newest")
def test_configured_context_limits_sequence_length(directory):
    engine, _ = start(directory, max_sequence_length=10)
    publish(engine, directory, 0)
    with pytest.raises(
        AlignerError, match="prompt 1 has 7 tokens; with max_new_tokens=6 the sequence exceeds"
    ):
        generate(engine, requests(), GREEDY)
    engine.shutdown()


@pytest.mark.usefixtures("newest")
def test_wake_resumes_model_before_update_and_cache_after(directory, wanted):
    engine, llm = start(directory)
    publish(engine, directory, 0)
    assert texts(engine) == wanted
    llm.calls.clear()
    engine.sleep()
    engine.wake()
    publish(engine, directory, 1)
    assert llm.calls == ["release", "resume model", "update", "end update", "resume cache"]
    assert texts(engine) == wanted
    engine.shutdown()


@pytest.mark.usefixtures("newest")
def test_engine_without_weights_can_sleep_after_wake(directory, wanted):
    engine, _ = start(directory)
    for version in (0, 1):
        engine.sleep()
        engine.wake()
        engine.sleep()
        engine.wake()
        publish(engine, directory, version)
        assert texts(engine) == wanted
    engine.shutdown()


@pytest.mark.usefixtures("newest")
def test_old_weights_serve_until_first_load(directory, wanted):
    engine, _ = start(directory)
    publish(engine, directory, 0)
    update = engine.begin_update(1)
    update.views(["model.norm.weight"])
    assert texts(engine) == wanted
    update.abort()
    assert engine.version == 0
    assert texts(engine) == wanted
    update = engine.begin_update(2)
    write(engine, update, directory)
    assert engine.version is None
    with pytest.raises(
        AlignerError, match="no weights: the weight update to version 2 is in progress"
    ):
        texts(engine)
    update.commit()
    assert engine.version == 2
    engine.shutdown()


@pytest.mark.usefixtures("newest")
def test_failed_commit_leaves_no_weight_version(directory, wanted, monkeypatch):
    engine, llm = start(directory)
    update = engine.begin_update(3)
    write(engine, update, directory)
    with monkeypatch.context() as patch:
        patch.setattr(llm.workers[0], "update_weights", lambda handles: False, raising=False)
        with pytest.raises(AlignerError, match="worker 0 failed in update_weights: False"):
            update.commit()
    assert engine.version is None
    with pytest.raises(AlignerError, match="the weight update to version 3 failed"):
        texts(engine)
    publish(engine, directory, 4)
    assert texts(engine) == wanted
    engine.shutdown()


@pytest.mark.usefixtures("newest")
def test_missing_worker_reply_fails_update(directory, monkeypatch):
    engine, llm = start(directory)
    workers = llm.workers
    monkeypatch.setattr(llm, "workers", [])
    update = engine.begin_update(3)
    with pytest.raises(
        AlignerError, match="update_weights: only 0 of 1 TensorRT-LLM workers answered"
    ):
        write(engine, update, directory)
    update.abort()
    llm.workers = workers
    engine.shutdown()


@pytest.mark.usefixtures("newest")
def test_workers_on_other_gpus_than_ranks_are_refused(directory, monkeypatch):
    monkeypatch.setattr(FakeLLM, "device_uuid", lambda self, rank: f"CPU-{rank + 4}")
    with pytest.raises(
        AlignerError, match="workers run on the GPUs CPU-4, but the replica's ranks run on CPU-0"
    ):
        start(directory)


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "does not end"])
def test_failed_start_shuts_down_engine(directory, monkeypatch, ends):
    ended = []

    async def fail(self):
        raise RuntimeError("no GPU is free")

    def shutdown(self):
        ended.append(self)
        if not ends:
            raise RuntimeError("Ray is gone")

    monkeypatch.setattr(FakeLLM, "setup_async", fail)
    monkeypatch.setattr(FakeLLM, "shutdown", shutdown)
    threads = set(threading.enumerate())
    if ends:
        with pytest.raises(RuntimeError, match="no GPU is free"):
            start(directory)
    else:
        with pytest.raises(
            AlignerError,
            match="no GPU is free; the shutdown of TensorRT-LLM failed as well: Ray is gone",
        ):
            start(directory)
    assert len(ended) == 1
    assert set(threading.enumerate()) <= threads


@pytest.mark.usefixtures("newest")
def test_workers_are_shut_down_at_process_exit(directory, monkeypatch):
    at_exit = []
    monkeypatch.setattr(atexit, "register", lambda call, *more: at_exit.append(call))
    engine, llm = start(directory)
    assert llm.workers
    at_exit[-1]()
    assert not llm.workers
    engine.shutdown()


def test_blocked_event_loop_closes_in_time(monkeypatch):
    monkeypatch.setattr(client, "_CLOSE_TIMEOUT_S", 0.1)
    loop, go_on = client.EventLoop("blocked"), threading.Event()

    async def block():
        go_on.wait()

    loop.submit(block())
    begin = time.monotonic()
    loop.close()
    assert time.monotonic() - begin < 5
    go_on.set()


@pytest.mark.usefixtures("newest")
def test_plain_float_logprobs_are_accepted(directory):
    engine, llm = start(directory)
    publish(engine, directory, 0)
    by_id = [sample.engine_logprobs.tolist() for sample in generate(engine, requests(), GREEDY)]
    llm.logprobs_by_id = False
    assert [
        sample.engine_logprobs.tolist() for sample in generate(engine, requests(), GREEDY)
    ] == by_id
    engine.shutdown()


@pytest.mark.usefixtures("newest")
def test_failed_request_is_reported_with_prompt(directory, monkeypatch):
    engine, llm = start(directory)
    publish(engine, directory, 0)

    def fail(sequence, params, generator):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(llm, "draw", fail)
    with pytest.raises(AlignerError, match="prompt 0, sample 0: illegal memory access"):
        generate(engine, requests(count=1), GREEDY)
    engine.shutdown()


@pytest.mark.usefixtures("newest")
def test_engine_without_tokens_times_out(directory, monkeypatch):
    settings = dataclasses.replace(
        engines.SETTINGS,
        tensorrt_llm=dataclasses.replace(engines.SETTINGS.tensorrt_llm, timeout_s=0.3),
    )
    engine, _ = start(directory, settings)
    publish(engine, directory, 0)

    async def hang(self):
        await asyncio.sleep(60)

    monkeypatch.setattr("tests.engines.tensorrt_llm.fake.Output._draw", hang)
    generation = SingleResponses(engine).start(requests(), GREEDY)
    with pytest.raises(
        AlignerError, match=r"generated no token for any of 4 responses within 0\.3 s"
    ):
        run_steps(generation)
    engine.shutdown()


@pytest.mark.usefixtures("newest")
def test_interrupted_response_resamples_unreported_tokens(directory):
    settings = dataclasses.replace(
        engines.SETTINGS, tensorrt_llm=TensorRTLLMConfig(stream_interval=4), in_flight="interrupt"
    )
    engine, _ = start(directory, settings)
    publish(engine, directory, 0)
    model, (short, *others) = engines.reference_model(directory), requests()
    generation = SingleResponses(engine).start(
        [dataclasses.replace(short, max_new_tokens=6), *others], SamplingOptions(30, greedy=True)
    )
    found = generation.step()
    while not found:
        found = generation.step()
    assert [place for place, _ in found] == [0]
    begun = [sample for _, sample in sorted(generation.interrupt(), key=lambda pair: pair[0])]
    lengths = [len(response(sample)) for sample in begun]
    assert all(count % 4 == 0 for count in lengths) and any(lengths)
    rest = [
        dataclasses.replace(request, partial_sample=sample)
        for request, sample in zip(others, begun, strict=True)
    ]
    samples = engines.generate(engine, rest, SamplingOptions(30, greedy=True))
    for request, sample in zip(others, samples, strict=True):
        assert response(sample) == greedy(model, request.prompt.tokens, 30)
    engine.shutdown()


def test_worker_environment_has_gpus_but_no_launcher_variables():
    before = {
        "HOME": "/h",
        "SLURM_JOB_ID": "1",
        "OMPI_COMM": "2",
        "PMI_RANK": "3",
        "PMIX_ID": "4",
        "RANK": "5",
        "MASTER_PORT": "6",
    }
    after = build_worker_environment(before, (2, 3))
    assert after["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert after["TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL"] == "1"
    assert [name for name in before if name in after] == ["HOME"]


def test_environment_is_restored_after_error(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(RuntimeError), replace_environment({"ONLY": "this"}):
        assert dict(os.environ) == {"ONLY": "this"}
        raise RuntimeError
    assert os.environ["SLURM_JOB_ID"] == "7"
    assert "ONLY" not in os.environ


def test_gpu_index_refuses_gpu_uuid():
    assert parse_gpu_index("5") == 5
    with pytest.raises(
        AlignerError,
        match="CUDA_VISIBLE_DEVICES contains GPU-1f: TensorRT-LLM requires GPU indices",
    ):
        parse_gpu_index("GPU-1f")
