"""The paged KV cache: memory of mixed lengths, shared prefixes, preemption, and attention over
blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from aligner.data.types import Prompt, Sample
from aligner.engines.embedded import block_attention, embedded_engine, forward_context
from aligner.engines.embedded.block_pool import BlockPool
from aligner.engines.embedded.cache import CacheSize, KVCache
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.embedded.prefix_cache import CachedSequence, PrefixCache
from aligner.engines.engine_loop import SingleResponses
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.models import score_attention
from aligner.schema import SpeculationConfig
from tests.engines.engines import generate
from tests.engines.test_embedded import make_engine, make_requests, response, save_llama, save_model
from tests.engines.test_generation import assert_same, begin, mixed_requests, record_steps
from tests.megatron import families

OPTIONS = SamplingOptions(12)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), tied=True)


@pytest.fixture(scope="module")
def long_directory(tmp_path_factory) -> Path:
    """A model with room for long sequences."""
    return save_model(tmp_path_factory.mktemp("long"), "llama", max_position_embeddings=4096)


def limit_blocks(monkeypatch: pytest.MonkeyPatch, blocks: int, block_tokens: int = 2) -> None:
    """Give engines from now on a KV cache of `blocks` small blocks, but at least one sequence."""

    def compute(token_bytes: int, tokens: int, max_sequences: int, *_: object) -> CacheSize:
        needed = CacheSize.from_sequences(1, tokens, block_tokens).blocks
        return CacheSize(max_sequences, tokens, block_tokens, max(blocks, needed))

    monkeypatch.setattr(embedded_engine, "compute_cache_size", compute)


def count_tokens_in_cache(engine: EmbeddedEngine) -> int:
    """Return the number of tokens of the requests in flight, except their newest ones."""
    return sum(response.length - 1 for response in engine._scheduler._running)


@pytest.mark.promise("paged-cache-memory")
def test_mixed_lengths_take_1_1_times_their_sum(long_directory):
    """No prompt is shared. In the 1 MiB, rows of the maximum length would hold four sequences."""
    token_bytes = 2 * 3 * 2 * 8 * 4
    lengths = [40 + 37 * index % 500 for index in range(12)]
    prompts = [Prompt(index, "", torch.arange(index, index + 30)) for index in range(12)]
    requests = [
        GenerationRequest(prompt, 0, length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    engine = make_engine(long_directory, kv_cache_mib=1)
    assert (1 << 20) // (token_bytes * 600) == 4
    steps = record_steps(engine)
    generation = SingleResponses(engine).start(requests, SamplingOptions(600))
    most_tokens = most_blocks = 0
    while not generation.is_done:
        generation.step()
        most_tokens = max(most_tokens, count_tokens_in_cache(engine))
        most_blocks = max(most_blocks, engine._scheduler._pool.num_used)
    used = most_blocks * engine._state.cache.size.block_tokens
    assert most_tokens <= used <= 1.1 * most_tokens
    assert engine._state.num_preemptions == 0
    assert max(len(step.tokens) for step in steps) == len(requests)
    assert engine._scheduler._pool.num_used == 0


@pytest.mark.promise("preemption-changes-no-sample")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"steps_per_sync": 4},
        {"speculation": SpeculationConfig(tokens=3, ngram=1, rows=64)},
    ],
    ids=["plain", "steps-per-sync", "speculation"],
)
def test_preempted_requests_generate_equal_samples(directory, monkeypatch, settings):
    options = SamplingOptions(12, top_p=0.9, renormalize=True)
    expected = generate(make_engine(directory), mixed_requests(), options)
    limit_blocks(monkeypatch, 20)
    engine = make_engine(directory, **settings)
    assert_same(generate(engine, mixed_requests(), options), expected)
    assert engine.take_counts().preemptions > 0 == engine.take_counts().preemptions
    assert engine._scheduler._pool.num_used == 0


@pytest.mark.promise("preemption-changes-no-sample")
@pytest.mark.parametrize("blocks", [9, 20, 40])
def test_preempted_exact_samples_are_bitwise_equal(directory, monkeypatch, blocks):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = generate(make_engine(directory, exact=True), mixed_requests(), OPTIONS)
        limit_blocks(monkeypatch, blocks)
        engine = make_engine(directory, exact=True)
        samples = generate(engine, mixed_requests(), OPTIONS)
    finally:
        torch.set_num_threads(threads)
    assert engine._state.num_preemptions > 0
    for sample, other in zip(samples, expected, strict=True):
        assert torch.equal(sample.tokens, other.tokens)
        assert torch.equal(sample.engine_logprobs, other.engine_logprobs)


def make_family_requests() -> list[GenerationRequest]:
    """Return requests for the models of `tests.megatron.families`."""
    prompts = [Prompt(index, "", torch.arange(2, 5 + index)) for index in range(4)]
    return [GenerationRequest(prompt, index) for prompt in prompts for index in range(2)]


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3", "gpt-oss", "gemma2"])
@pytest.mark.parametrize("max_copied_bytes", [0, 1 << 20])
def test_preemption_in_other_families(tmp_path, monkeypatch, family, max_copied_bytes):
    """Delta nets, latents, sinks and soft caps; blocks that are read where they are, or copied."""
    monkeypatch.setattr(forward_context, "_MAX_COPIED_BYTES", max_copied_bytes)
    path = families.save(family, tmp_path)
    requests = make_family_requests()
    expected = generate(make_engine(path), requests, OPTIONS)
    limit_blocks(monkeypatch, 20)
    engine = make_engine(path)
    samples = generate(engine, requests, OPTIONS)
    assert engine._state.num_preemptions > 0
    assert [response(sample) for sample in samples] == [response(sample) for sample in expected]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_steps_with_many_keys_read_them_where_they_are(tmp_path, monkeypatch, family):
    """The kernel of a step depends on the size of its keys; the samples do not."""
    path = families.save(family, tmp_path)
    plans = []
    build_plan = block_attention.build_plan

    def count_plans(*arguments: Any) -> Any:
        plans.append(arguments)
        return build_plan(*arguments)

    monkeypatch.setattr(block_attention, "build_plan", count_plans)
    limit_blocks(monkeypatch, 1000)
    engine = make_engine(path)
    expected = generate(engine, make_family_requests(), OPTIONS)
    assert not plans
    # The first steps read at most five blocks of eight rows; the last ones read eight.
    block_bytes = engine._state.cache.keys[0, 0].numel() * 4
    monkeypatch.setattr(forward_context, "_MAX_COPIED_BYTES", 8 * 5 * block_bytes)
    steps = record_steps(engine)
    assert_same(generate(engine, make_family_requests(), OPTIONS), expected)
    assert 0 < len(plans) < len(steps)
    monkeypatch.setattr(forward_context, "_MAX_COPIED_BYTES", 0)
    assert_same(generate(engine, make_family_requests(), OPTIONS), expected)


def test_finish_update_completes_preempted_requests(directory, monkeypatch):
    limit_blocks(monkeypatch, 12)
    engine = make_engine(directory)
    generation = SingleResponses(engine).start(make_requests(2), OPTIONS)
    samples: dict[int, Sample] = {}
    while not engine._state.num_preemptions:
        samples |= generation.step()
    waiting = engine._scheduler._waiting_responses
    assert waiting.first.was_preempted and not all(each.was_preempted for each in waiting)
    begin(engine, directory, 1, "finish").commit()
    while not generation.is_done:
        samples |= generation.step()
    versions = [set(sample.weight_versions.tolist()) for sample in samples.values()]
    assert {0} in versions and {1} in versions and all(len(each) == 1 for each in versions)


def test_preempted_request_is_first_to_continue(directory, monkeypatch):
    """The requests complete in the order of their admission, and none starves."""
    limit_blocks(monkeypatch, 6)
    engine = make_engine(directory)
    generation = SingleResponses(engine).start(make_requests(2), OPTIONS)
    order = []
    while not generation.is_done:
        order += [index for index, _ in generation.step()]
    assert engine._state.num_preemptions > 0 and order == sorted(order)


def test_samples_of_a_prompt_share_its_blocks(long_directory, monkeypatch):
    """Also the samples that start while others are in flight."""
    # The kernel that reads shared blocks once.
    monkeypatch.setattr(forward_context, "_MAX_COPIED_BYTES", 0)
    prompt = Prompt(0, "", torch.arange(100))
    requests = [GenerationRequest(prompt, index, 20 + index) for index in range(12)]
    engine = make_engine(long_directory, batch_size=8)
    generation = SingleResponses(engine).start(requests, SamplingOptions(60))
    size = None
    while not generation.is_done:
        generation.step()
        size = engine._state.cache.size
        running = engine._scheduler._running
        prompt_blocks = 100 // size.block_tokens
        tables = [each.blocks[:prompt_blocks] for each in running]
        assert all(table == tables[0] for table in tables)
        own_blocks = sum(len(each.blocks) - prompt_blocks for each in running)
        used_blocks = own_blocks + prompt_blocks if running else 0
        assert engine._scheduler._pool.num_used == used_blocks
    assert size is not None and 100 // size.block_tokens > 1
    expected = [
        generate(make_engine(long_directory), [request], SamplingOptions(60))[0]
        for request in requests[::5]
    ]
    again = generate(engine, requests, SamplingOptions(60))
    assert_same(again[::5], expected)


def test_unused_blocks_take_no_memory_on_cpus(directory):
    def measure() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10

    engine = make_engine(directory)
    cache = KVCache(engine._shape, 1, torch.device("cpu"), torch.float32)
    before = measure()
    cache.resize(CacheSize.from_sequences(1 << 10, 1 << 10, 32))
    assert cache._storage.nbytes > 300 << 20
    cache.keys[:, :100] = 1
    assert measure() - before < 20 << 20


def test_pool_allocates_lowest_blocks_and_counts_references():
    pool = BlockPool(6)
    first, second = pool.allocate(3), pool.allocate(2)
    assert (first, second, pool.num_free, pool.num_touched) == ([0, 1, 2], [3, 4], 1, 5)
    pool.share(first[:2])
    pool.release(first)
    assert pool.num_used == 4 and pool.allocate(2) == [2, 5]
    pool.release(first[:2])
    assert pool.allocate(2) == [0, 1]


def test_prefix_cache_evicts_oldest_sequence_first():
    pool = BlockPool(6)
    cache = PrefixCache(pool)
    old, new, other = (
        CachedSequence(key, tokens, pool.allocate(2))
        for key, tokens in (((0, 0), [1, 2]), ((0, 0), [1, 2, 3]), ((1, 0), [1, 2]))
    )
    for sequence in (old, new, other):
        cache.add(sequence)
    assert cache.find_prefix((0, 0), [1, 2, 3, 4]) is new
    assert cache.find_prefix((0, 0), [1, 2, 3]) is old
    assert cache.find_prefix((0, 0), [1, 4, 3]) is None
    cache.take(new)
    assert cache.evict_oldest() and pool.num_free == 2
    cache.evict_sample((1, 0))
    assert pool.num_free == 4 and not cache.evict_oldest()


def build_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Return the attention over contiguous keys and values, [R, H * value dim]."""
    if options:
        visible = mask == 0
        attention = score_attention.attend(query[:, :, None], keys, values, visible, **options)
    else:
        attention = F.scaled_dot_product_attention(
            query[:, :, None], keys, values, attn_mask=mask[:, None], enable_gqa=True
        )
    return attention.flatten(1)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("sharing", ["none", "some", "all", "many"])
@pytest.mark.parametrize("spread", [1, 9])
def test_block_attention_equals_contiguous_attention(options, sharing, spread):
    generator = torch.Generator().manual_seed(4)
    rows, width, tokens, kv_heads, dim = 11, 5, 4, 2, 8
    num_blocks = torch.tensor([5, 1, 2, 5, 3, 4, 1, 5, 2, 3, 5])
    order = torch.randperm(rows * width, generator=generator) * spread
    tables = order.view(rows, width)
    shared = {"none": 0, "some": 3, "all": 2, "many": rows}[sharing]
    if sharing == "all":  # every block has two readers
        num_blocks = num_blocks[torch.arange(rows) // 2]
        tables = tables[torch.arange(rows) // 2]
        tables[-1] = tables[0]
        num_blocks[-1] = num_blocks[0]
    tables[:shared, 0] = tables[0, 0]
    keys, values = torch.randn(2, rows * width * spread, kv_heads, tokens, dim, generator=generator)
    query = torch.randn(rows, 3 * kv_heads, dim, generator=generator)
    if options.get("sinks"):
        options = {"sinks": torch.randn(3 * kv_heads, generator=generator)}
    lengths = num_blocks * tokens - torch.randint(0, tokens, (rows,), generator=generator)
    is_hidden = torch.arange(width * tokens) >= lengths[:, None]
    mask = torch.zeros(rows, 1, width * tokens).masked_fill(is_hidden[:, None], float("-inf"))

    plan = block_attention.build_plan(tables, num_blocks, kv_heads, 3)
    found = block_attention.attend(query, keys, values, plan, mask, scale=None, **options)
    contiguous = [cached[tables].transpose(1, 2).flatten(2, 3) for cached in (keys, values)]
    expected = build_reference(query, *contiguous, mask, **options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    # The result does not depend on the placement of the blocks.
    places = torch.randperm(len(keys), generator=generator)
    moved_keys, moved_values = torch.empty_like(keys), torch.empty_like(values)
    moved_keys[places], moved_values[places] = keys, values
    plan = block_attention.build_plan(places[tables], num_blocks, kv_heads, 3)
    moved = block_attention.attend(
        query, moved_keys, moved_values, plan, mask, scale=None, **options
    )
    torch.testing.assert_close(moved, found, atol=1e-6, rtol=1e-6)
