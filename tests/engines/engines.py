"""Engines of every kind behind one function, a tiny model for them, and weight sync without a
trainer."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.distributed as dist
from torch import Tensor

from aligner.data.model_directory import read_slices
from aligner.data.types import Prompt, Sample, collate
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_loop import (
    SingleResponses,
    append_completion,
    append_observation,
    create_unfinished_sample,
    run_steps,
)
from aligner.engines.engine_protocol import (
    EngineRequest,
    GenerationEngine,
    GenerationRequest,
    RequestKey,
    SamplingOptions,
)
from aligner.engines.vllm.vllm_engine import VLLMEngine
from aligner.models.hugging_face import read_config
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import compute_engine_slices, weight_table
from aligner.proof.comparison import TOLERANCE, choose_tolerance, may_be_rounding
from aligner.proof.reference import compute_logprobs, load_reference, measure_rounding
from aligner.resharding.weight_update import WeightUpdate
from aligner.schema import EngineConfig, EngineParallelConfig, TensorRTLLMConfig, VLLMConfig
from tests.engines.vllm import shared_clients

VOCABULARY, CONTEXT = 120, 48
SETTINGS = EngineConfig(
    parallel=EngineParallelConfig(tensor=1, data=1),
    precision="fp32",
    sleep=True,
    update="in_place",
    cuda_graphs=False,
    bucket_mib=1,
    tensorrt_llm=TensorRTLLMConfig(stream_interval=1),
    vllm=VLLMConfig(stream_interval=1, timeout_s=280),  # starts slowly next to other tests
)
KINDS = ("embedded-atomic", "embedded-in_place", "tensorrt_llm")


def save_tiny(
    directory: Path,
    seed: int,
    kv_heads: int = 2,
    tied: bool = False,
    layers: int = 2,
    head_dim: int = 8,
) -> Path:
    """Save a model whose tokens are words of one to six letters, each "a" or "b"."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    words = (
        "".join(letters) for size in range(1, 7) for letters in itertools.product("ab", repeat=size)
    )
    vocabulary = {word: token for token, word in enumerate(itertools.islice(words, VOCABULARY))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def engine_bytes(engine: EmbeddedEngine) -> int:
    """Bytes of device memory that the engine holds: weights, spare weights and KV cache."""
    spare = 0 if engine._spare is None else engine._spare.storage.nbytes
    return engine._weights.storage.nbytes + spare + engine._state.cache._storage.nbytes


def shape_of(directory: Path) -> ModelShape:
    return read_config(json.loads((directory / "config.json").read_text()), str(directory))


def reference_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@contextmanager
def engine_of(
    kind: str, directory: Path, seed: int = 7, **settings: Any
) -> Iterator[GenerationEngine]:
    """Yield an engine of `kind` without weights."""
    if kind == "tensorrt_llm":
        from aligner.engines.tensorrt_llm.tensorrt_llm_engine import TensorRTLLMEngine
        from tests.engines.tensorrt_llm.fake import installed

        with installed():
            engine = TensorRTLLMEngine(
                directory,
                shape_of(directory),
                dataclasses.replace(SETTINGS, **settings),
                0,
                seed,
                device="cpu",
                dtype=torch.float32,
            )
            yield engine
            engine.shutdown()
    elif kind == "vllm":
        chosen = dataclasses.replace(SETTINGS, **{"kind": kind, "kv_cache_mib": 64} | settings)
        with shared_clients.shared():
            yield VLLMEngine(directory, shape_of(directory), chosen, 0, seed)
    else:
        chosen = dataclasses.replace(SETTINGS, update=kind.partition("-")[2], **settings)
        yield EmbeddedEngine(shape_of(directory), chosen, 0, seed, tokenizer_directory=directory)


def file_tensors(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def write(
    engine: GenerationEngine, update: WeightUpdate, directory: Path, leave_out: str = ""
) -> None:
    """Load this rank's slices of a directory's tensors, in groups of at most `group_bytes`.

    The groups contain whole tensors, so that they are the same on all ranks of a replica.
    """
    to, table = engine.weight_format, weight_table(shape_of(directory))
    rank = dist.get_rank() if dist.is_initialized() else 0
    slices = dict(read_slices(directory, table, to.compute_slices(table, rank)))
    groups: list[list[str]] = [[]]
    held = 0
    for spec in table:
        if spec.name == leave_out:
            continue
        size = spec.numel * to.dtype.itemsize
        if to.group_bytes is not None and groups[-1] and held + size > to.group_bytes:
            groups.append([])
            held = 0
        groups[-1].append(spec.name)
        held += size
    for group in groups:
        own = [name for name in group if name in slices]
        views = update.views(own)
        for name in own:
            views[name].copy_(slices[name])
        update.load(own)


def publish(
    engine: GenerationEngine, directory: Path, version: int, in_flight: str = "finish"
) -> None:
    engine._settings = dataclasses.replace(engine._settings, in_flight=in_flight)
    update = engine.begin_update(version)
    write(engine, update, directory)
    update.commit()


def generate(
    engine: GenerationEngine, requests: Sequence[GenerationRequest], options: SamplingOptions
) -> list[Sample]:
    """Generate one sample per request, in the order of the requests."""
    generation = SingleResponses(engine).start(requests, options)
    try:
        samples = run_steps(generation)
    finally:
        generation.cancel()
    return [samples[index] for index in range(len(requests))]


class Turns:
    """Responses of several turns, whose observations are given by the test."""

    def __init__(
        self,
        engine: GenerationEngine,
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
        turn_tokens: int,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._options = options
        self._turn_tokens = turn_tokens
        self._in_flight: dict[int, EngineRequest] = {}
        self._samples: dict[int, Sample] = {}
        engine.check([], options)
        longest = max(len(each.prompt.tokens) + each.get_token_limit(options) for each in requests)
        engine.reserve(len(requests), longest)
        for place, request in enumerate(requests):
            self._submit(place, create_unfinished_sample(request))

    def _submit(self, place: int, sample: Sample) -> None:
        request, used = self._requests[place], len(sample.response)
        generated = (
            sample.split_turns()[-1] if sample.generated_mask is not None else sample.response
        )
        turn_left = self._turn_tokens - len(generated) * (len(sample.split_turns()) % 2)
        left = min(request.get_token_limit(self._options) - used, turn_left)
        self._samples[place] = sample
        self._in_flight[place] = self._engine.submit(
            sample.tokens,
            dataclasses.replace(self._options, max_new_tokens=left),
            RequestKey(request.prompt.id, request.sample_index, sample.prompt_length),
            is_continued=True,
        )

    def go_on(self, place: int, observation: Sequence[int]) -> None:
        """Continue a response after its observation."""
        limit = self._requests[place].get_token_limit(self._options)
        self._submit(place, append_observation(self._samples[place], observation, limit))

    def step(self) -> list[tuple[int, Sample]]:
        """Run one engine step, and return the responses whose turn is complete."""
        self._engine.step()
        return self._collect()

    def interrupt(self) -> list[tuple[int, Sample]]:
        self._engine.interrupt()
        return self._collect()

    @property
    def is_done(self) -> bool:
        return not self._in_flight

    def _collect(self) -> list[tuple[int, Sample]]:
        complete = [place for place, each in self._in_flight.items() if each.future.done()]
        for place in complete:
            completion = self._in_flight.pop(place).future.result()
            self._samples[place] = append_completion(self._samples[place], completion)
        return [(place, self._samples[place]) for place in sorted(complete)]


def load_directory(engine: EmbeddedEngine, directory: Path, version: int = 0) -> None:
    """Sync this rank's slices of a Hugging Face directory of safetensors to the engine."""
    table = weight_table(engine._shape)
    pieces = read_slices(
        directory,
        table,
        compute_engine_slices(
            table, engine.weight_format.layout, engine._state.decoder._ranks.rank
        ),
    )
    update = engine.begin_update(version)
    for name, tensor in pieces:
        update.views([name])[name].copy_(tensor)
        update.load([name])
    update.commit()


def prompts(count: int = 4) -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    lengths = (3, 7, 1, 7, 5, 2)[:count]
    return [
        Prompt(at, "", torch.randint(0, VOCABULARY, (n,), generator=generator))
        for at, n in enumerate(lengths)
    ]


def requests(samples: int = 1, count: int = 4) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt, index) for prompt in prompts(count) for index in range(samples)
    ]


def response(sample: Sample) -> list[int]:
    return sample.tokens[sample.prompt_length :].tolist()


def whole_logprobs(model: Any, sample: Sample, temperature: float) -> Tensor:
    """Log-probs [R] of the response tokens, computed by a full forward pass."""
    with torch.no_grad():
        logits = model(sample.tokens[None]).logits[0, sample.prompt_length - 1 : -1]
    return (
        (logits / temperature)
        .log_softmax(-1)
        .gather(1, sample.tokens[sample.prompt_length :, None])
        .squeeze(1)
    )


def greedy(model: Any, tokens: Tensor, count: int) -> list[int]:
    """Return the next `count` tokens of transformers' greedy decoding."""
    if not count:
        return []
    everything = torch.ones_like(tokens)[None]  # token 0 may be part of a prompt
    generated = model.generate(
        tokens[None],
        attention_mask=everything,
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return generated[0, len(tokens) :].tolist()


def find_tolerance(directory: str, samples: list[Sample], error: float) -> float:
    """Return 1e-5, or twice the rounding error of transformers for samples if that is larger.

    Args:
        directory: Directory of the model.
        samples: Samples of the engine. The rounding is that of their log-probs over the whole
            vocabulary at `jobs.TEMPERATURE`.
        error: Largest difference to Megatron; the rounding is measured only if it is above 1e-5.
    """
    if not may_be_rounding([error]):
        return TOLERANCE
    batch = collate(samples, pad_token_id=0)

    def compute_error(logprobs: Tensor, exact: Tensor) -> dict[str, float]:
        difference = torch.where(batch.mask, logprobs - exact, 0.0)
        return {"logprobs": float(difference.abs().max())}

    with torch.no_grad():
        rounding = measure_rounding(
            functools.partial(load_reference, Path(directory)),
            lambda model: compute_logprobs(model, batch.tokens, batch.lengths),
            compute_error,
        )
    return choose_tolerance(rounding["logprobs"])
