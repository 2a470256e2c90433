"""Episodes of agents and of environments with the installed vLLM: tokens, log-probs, branches,
weight versions, and reuse of the KV cache."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from aligner.agents.agent_episodes import AgentEpisodes
from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episodes import EnvironmentEpisodes
from aligner.agents.tool_catalogue import list_tools, with_tool_arguments
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Completion, Prompt, Sample
from aligner.engines.engine_loop import EpisodeSource, run_steps
from aligner.engines.engine_protocol import GenerationRequest, RequestKey, SamplingOptions
from aligner.engines.external import external_engine
from aligner.engines.vllm.vllm_engine import VLLMEngine
from aligner.schema import VLLMConfig
from aligner.schema.environment import EnvironmentConfig
from tests.agents.calling_model import saved
from tests.agents.openai_agents import TOOLS
from tests.agents.test_agents import CONTEXT, agent, generated_spans
from tests.agents.test_branches import FORGETFUL
from tests.engines import engines
from tests.engines.vllm.shared_clients import NEEDED

pytestmark = [*NEEDED, pytest.mark.timeout(900)]
HEAD_DIM = 32  # the smallest one that vLLM supports on CPUs
LOOK = "tests.agents.tool_samples:look"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of one shape, whose weights one engine can have in turn.

    The first calls a tool; `chatml` is not trained and rarely ends a turn; the chat template of
    `forgetful` is not append-only.
    """
    torch.set_num_threads(1)
    found = {
        name: saved(tmp_path_factory.mktemp(name), name, head_dim=HEAD_DIM)
        for name in ("qwen", "chatml")
    }
    found["forgetful"] = directory = saved(
        tmp_path_factory.mktemp("forgetful"), "chatml", head_dim=HEAD_DIM
    )
    template = FORGETFUL.replace("KEPT", "1").replace("<eos>", "<|end|>")
    (directory / "chat_template.jinja").write_text(template)
    weights = load_file(directory / "model.safetensors")
    (end,) = Tokenizer(directory).encode("<|end|>").tolist()
    weights["lm_head.weight"][end] *= 8
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return found


@pytest.fixture(scope="module")
def engine(models: dict[str, Path]) -> Iterator[VLLMEngine]:
    settings = dataclasses.replace(
        engines.SETTINGS,
        kind="vllm",
        kv_cache_mib=64,
        batch_size=16,
        vllm=VLLMConfig(stream_interval=1, timeout_s=500),
    )
    engine = VLLMEngine(models["qwen"], engines.shape_of(models["qwen"]), settings, 0, seed=2)
    yield engine
    engine.shutdown()


def run_agents(
    engine: VLLMEngine,
    model: Path,
    tasks: Sequence[dict[str, Any]],
    settings: dict[str, Any],
    drive: Callable[[Any], dict[int, Sample]] = run_steps,
    *,
    stop_at_eos: bool = True,
) -> list[Sample]:
    """Run one episode per task with the engine's weights, and return the samples.

    `drive` runs the steps of the episodes.
    """
    tokenizer = Tokenizer(model)
    chosen = EnvironmentConfig(
        **{"max_turns": 12, "max_turn_tokens": 80, "deadline_s": 200.0} | settings
    )
    prompt = tokenizer.encode("task")
    requests = [
        GenerationRequest(Prompt(at, "task", prompt, {"at": at, "asked": f"why {at}?", **task}), 0)
        for at, task in enumerate(tasks)
    ]
    source: EpisodeSource = AgentEpisodes.create(engine, tokenizer, chosen, 3, CONTEXT)
    options = SamplingOptions(100, stop_token_ids=tokenizer.eos_token_ids if stop_at_eos else ())
    try:
        found = drive(source.start(requests, options))
    finally:
        source.close()
    return [found[place] for place in range(len(requests))]


def reference_logprobs(model: Path, tokens: Tensor) -> Tensor:
    """Log-probs [T, V] of the token after each position, from transformers."""
    with torch.no_grad():
        return (
            LlamaForCausalLM.from_pretrained(model).eval()(tokens[None]).logits[0].log_softmax(-1)
        )


def assert_logprobs_equal_forward_pass(model: Path, samples: Sequence[Sample]) -> None:
    for sample in samples:
        for sequence in (sample, *sample.branches):
            logprobs = reference_logprobs(model, sequence.tokens)
            for start, tokens, recorded in generated_spans(sequence):
                positions = logprobs[start - 1 : start - 1 + len(tokens)]
                expected = positions.gather(1, tokens[:, None])[:, 0]
                torch.testing.assert_close(recorded, expected, atol=1e-4, rtol=0)


@pytest.mark.promise("agent-training-uses-generated-tokens")
def test_tool_loop_of_agent_on_vllm_has_generated_tokens(engine, models):
    engines.publish(engine, models["qwen"], 1)
    samples = run_agents(engine, models["qwen"], [{}] * 4, agent("looks"))
    assert_logprobs_equal_forward_pass(models["qwen"], samples)
    for sample in samples:
        spans = [span for each in (sample, *sample.branches) for span in generated_spans(each)]
        assert len(spans) == 3 and float(sample.rewards.sum()) == 0.5
    assert sum(not sample.branches for sample in samples) >= 2


def test_parallel_requests_of_agent_on_vllm_are_branches(engine, models):
    engines.publish(engine, models["chatml"], 2)
    samples = run_agents(engine, models["chatml"], [{}] * 2, agent("branches"))
    assert_logprobs_equal_forward_pass(models["chatml"], samples)
    for sample in samples:
        # six turns: the first, three parallel ones, a second choice of one of them, and the last
        spans = [span for each in (sample, *sample.branches) for span in generated_spans(each)]
        assert len(spans) == 6 and len(sample.branches) >= 3
        # both choices of the same input have random numbers of their own
        assert len({tuple(tokens.tolist()) for _, tokens, _ in spans}) == 6


def run_environment(
    engine: VLLMEngine, model: Path, settings: EnvironmentConfig, tools: Any = None
) -> list[Sample]:
    """Run four episodes of one prompt, which shows these tools to the model."""
    tokenizer = Tokenizer(model)
    messages = [{"role": "user", "content": "why 0?"}]
    text = tokenizer.chat_template.render(messages, tools, add_generation_prompt=True)
    metadata = {"messages": messages} | ({"tools": tools} if tools else {})
    prompt = Prompt(0, text, tokenizer.encode(text), metadata)
    pool = EnvironmentPool.from_config(
        with_tool_arguments(settings, list_tools(settings), tokenizer)
    )
    options = SamplingOptions(300, stop_token_ids=tokenizer.eos_token_ids)
    try:
        pool.start()
        source = EnvironmentEpisodes(engine, pool, tokenizer, settings, seed=3)
        found = run_steps(source.start([GenerationRequest(prompt, i) for i in range(4)], options))
    finally:
        pool.close()
    return [found[place] for place in range(4)]


def test_tool_of_environment_is_called_on_vllm(engine, models):
    engines.publish(engine, models["qwen"], 3)
    settings = EnvironmentConfig(
        target="tools", tools=[LOOK], max_turn_tokens=120, deadline_s=100.0
    )
    samples = run_environment(engine, models["qwen"], settings, TOOLS)
    assert_logprobs_equal_forward_pass(models["qwen"], samples)
    tokenizer = Tokenizer(models["qwen"])
    answers = [
        tokenizer.decode(turn, skip_special_tokens=False)
        for sample in samples
        for turn in sample.split_turns()[1::2]
    ]
    assert any("saw here" in answer for answer in answers), answers


def test_environment_on_vllm_starts_branches(engine, models):
    engines.publish(engine, models["forgetful"], 4)
    settings = EnvironmentConfig(
        target="tests.agents.teller:Caller",
        arguments={"turns": 4},
        max_turn_tokens=60,
        deadline_s=100.0,
    )
    samples = run_environment(engine, models["forgetful"], settings)
    assert_logprobs_equal_forward_pass(models["forgetful"], samples)
    assert any(sample.branches for sample in samples)
    # the first turns of branches with equal prompts have different random numbers
    sequences = [each for sample in samples for each in (sample, *sample.branches)]
    assert len({tuple(each.tokens.tolist()) for each in sequences}) == len(sequences)


def test_agent_turn_continues_with_new_weights(engine, models, monkeypatch):
    """The weights change in the middle of turns, and each token has its version."""
    monkeypatch.setattr(external_engine, "_MAX_WAIT_S", 0.01)
    # vLLM is a separate process, and may finish the turns before the update
    versions = range(10, 20, 2)
    assert any(interrupt_agents(engine, models, version) for version in versions)


def interrupt_agents(engine: VLLMEngine, models: dict[str, Path], version: int) -> bool:
    """Update the weights from `version` to the next during agents' turns, and check their tokens.

    Return whether a turn has tokens of both versions.
    """
    engines.publish(engine, models["chatml"], version)

    def drive(generation: Any) -> dict[int, Sample]:
        found: dict[int, Sample] = {}
        while not generation.is_done and not any(
            response.output is not None and len(response.output.outputs[0].token_ids) > 10
            for response in engine._in_flight.values()
        ):
            found |= dict(generation.step())
        engines.publish(engine, models["qwen"], version + 1, in_flight="interrupt")
        return found | run_steps(generation)

    tasks = [{"requests": [[{"role": "user", "content": f"why {at}?"}]]} for at in range(4)]
    settings = {**agent("steps"), "max_turn_tokens": 700}
    samples = run_agents(engine, models["chatml"], tasks, settings, drive, stop_at_eos=False)
    interrupted = 0
    for sample in samples:
        versions = sample.weight_versions
        kept = int((versions == version).sum())
        assert versions.tolist() == [version] * kept + [version + 1] * (len(versions) - kept)
        interrupted += 0 < kept < len(versions)
        ((start, tokens, recorded),) = generated_spans(sample)
        expected = torch.cat(
            [
                reference_logprobs(models[name], sample.tokens)[start - 1 : -1][part]
                .gather(1, tokens[part, None])
                .squeeze(1)
                for name, part in (("chatml", slice(kept)), ("qwen", slice(kept, None)))
            ]
        )
        torch.testing.assert_close(recorded, expected, atol=1e-4, rtol=0)
    return interrupted > 0


def generate(engine: VLLMEngine, tokens: Tensor, count: int) -> Completion:
    request = engine.submit(tokens, SamplingOptions(count), RequestKey(0, 0, len(tokens), 0))
    while not request.future.done():
        engine.step()
    return request.future.result()


def test_turn_on_vllm_prefills_only_new_tokens(engine, models, monkeypatch):
    """vLLM caches whole blocks of 128 tokens on CPUs."""
    started = []
    start_request = engine._client._program.generate
    monkeypatch.setattr(
        engine._client._program,
        "generate",
        lambda *arguments: started.append(start_request(*arguments)) or started[-1],
    )
    engines.publish(engine, models["chatml"], 20)
    prompt = torch.arange(3, 203).repeat(3)
    turn = generate(engine, prompt, 100)
    observation = torch.arange(10, 40)
    generate(engine, torch.cat([prompt, turn.tokens, observation]), 5)
    engines.publish(engine, models["chatml"], 21)
    generate(engine, prompt, 5)
    # the last generated token is not part of the cache; 699 tokens have five full blocks
    assert [request.outputs[0].cached_tokens for request in started] == [0, 5 * 128, 0]


def test_prompts_longer_than_one_prefill_are_generated(engine, models):
    """vLLM on CPUs cannot divide the prefill of a request with a seed."""
    engines.publish(engine, models["chatml"], 30)
    draw = torch.Generator().manual_seed(1)
    prompts = [Prompt(at, "", torch.randint(3, 200, (700,), generator=draw)) for at in range(6)]
    samples = engines.generate(
        engine, [GenerationRequest(prompt, 0) for prompt in prompts], SamplingOptions(4)
    )
    assert [len(sample.response) for sample in samples] == [4] * 6
    assert_logprobs_equal_forward_pass(models["chatml"], samples)


@contextlib.contextmanager
def stopped_vllm(engine: VLLMEngine) -> Iterator[None]:
    """Stop the processes of vLLM, which otherwise may be ahead of this process on a busy machine."""
    group = engine._client._program.process.pid
    os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


def test_request_of_another_thread_wakes_the_waiting_engine(engine, models, monkeypatch):
    monkeypatch.setattr(external_engine, "_MAX_WAIT_S", 120.0)
    engines.publish(engine, models["chatml"], 40)
    tokens = torch.arange(3, 20)
    requests: list[Any] = []

    def submit() -> None:
        requests.append(engine.submit(tokens, SamplingOptions(1), RequestKey(2, 0, len(tokens))))

    with stopped_vllm(engine):
        without_stop_token = SamplingOptions(900, min_new_tokens=900)
        long = engine.submit(tokens, without_stop_token, RequestKey(1, 0, len(tokens)))
        engine.step()  # sends the request
        begin = time.monotonic()
        thread = threading.Timer(0.2, submit)
        thread.start()
        engine.step()  # waits for the response
        waited = time.monotonic() - begin
        thread.join()
    assert waited < 60
    assert not long.future.done()
    while not requests[0].future.done():
        engine.step()
    engine.interrupt()
