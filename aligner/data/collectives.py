"""Collectives that exchange JSON values and samples between ranks, never pickled objects."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.data.episode_reports import EpisodeReport
from aligner.data.types import (
    FINISH_REASONS,
    Grammar,
    GrammarSpan,
    Sample,
    SamplingSupport,
    concatenate_response_values,
    concatenate_support,
)
from aligner.errors import AlignerError

T = TypeVar("T")


def is_distributed(group: ProcessGroup | None = None) -> bool:
    """Return whether the group (None: the world) contains any other rank."""
    return dist.is_initialized() and dist.get_world_size(group) > 1


def shard_across_ranks(values: Sequence[T]) -> list[T]:
    """Return this rank's share of values that the ranks of the world process together."""
    if not is_distributed():
        return list(values)
    return list(values[dist.get_rank() :: dist.get_world_size()])


def broadcast_json(value: Any, source: int = 0, group: ProcessGroup | None = None) -> Any:
    """Return the JSON value of the group's rank `source` on every rank. Collective."""
    if not is_distributed(group):
        return value
    return json.loads(
        _broadcast_bytes(
            json.dumps(value).encode() if dist.get_rank(group) == source else b"", source, group
        )
    )


def run_on_rank0(
    action: Callable[[], Any],
    group: ProcessGroup | None = None,
    *,
    error_types: Sequence[type[AlignerError]] = (),
    heartbeat_s: float | None = None,
) -> Any:
    """Run `action` on the group's rank 0, and return its result on every rank. Collective.

    An error is sent to the other ranks, too; otherwise they would wait for the result until the
    collective times out.

    Args:
        action: Function that returns a JSON value. It is called on rank 0 only.
        group: Process group; None means the world.
        error_types: Types of errors that also the other ranks raise with their own type. Their
            constructors take one message.
        heartbeat_s: Interval in seconds at which rank 0 tells the other ranks that the action is
            still running, for actions that may take longer than the timeout of a collective. The
            action then runs in a thread. None sends no heartbeats.

    Raises:
        Exception: On rank 0, the error of the action.
        AlignerError: On the other ranks, the message of rank 0's error. The type is AlignerError if
            `error_types` does not contain the error's own type.
    """
    if not is_distributed(group):
        return action()

    if dist.get_rank(group) == 0:
        return _run_and_broadcast(action, group, heartbeat_s)

    # None is a heartbeat.
    while (answer := broadcast_json(None, group=group)) is None:
        pass
    if "error" in answer:
        types = {error_type.__name__: error_type for error_type in error_types}
        raise types.get(answer["type"], AlignerError)(answer["error"])
    return answer["value"]


def _run_and_broadcast(
    action: Callable[[], Any], group: ProcessGroup | None, heartbeat_s: float | None
) -> Any:
    """Run `action` on rank 0, and broadcast its outcome; see `run_on_rank0`."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    if heartbeat_s is None:
        run()
    else:
        # A daemon thread, so that an action that never returns does not keep the process alive.
        Thread(target=run, name="run_on_rank0", daemon=True).start()
        while not wait([outcome], heartbeat_s).done:
            broadcast_json(None, group=group)

    # Only the action's own error is sent. After an error of a broadcast, another broadcast would
    # fail too, or wait for its timeout.
    error = outcome.exception()
    if error is not None:
        is_described = isinstance(error, AlignerError)
        message = str(error) if is_described else f"{type(error).__name__}: {error}"
        broadcast_json({"error": message, "type": type(error).__name__}, group=group)
        raise error
    return broadcast_json({"value": outcome.result()}, group=group)["value"]


def _broadcast_bytes(data: bytes, source: int = 0, group: ProcessGroup | None = None) -> bytes:
    length = torch.tensor([len(data)])
    dist.broadcast(length, group=group, group_src=source)
    # Ranks other than the source have no data; padding gives all ranks a buffer of one size.
    buffer = torch.frombuffer(bytearray(data.ljust(int(length))), dtype=torch.uint8)
    dist.broadcast(buffer, group=group, group_src=source)
    return buffer.numpy().tobytes()


def gather_json(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return every rank's JSON value, in rank order, on every rank of the group. Collective."""
    if not is_distributed(group):
        return [value]
    return [json.loads(data) for data in _gather_bytes(json.dumps(value).encode(), group)]


def _gather_bytes(data: bytes, group: ProcessGroup | None = None) -> list[bytes]:
    lengths = [int(length) for length in _all_gather(torch.tensor([len(data)]), group)]
    # All-gather requires buffers of one size: pad to the longest, and remove the padding below.
    buffers = _all_gather(
        torch.frombuffer(bytearray(data.ljust(max(lengths))), dtype=torch.uint8), group
    )
    return [
        buffer.numpy().tobytes()[:length] for buffer, length in zip(buffers, lengths, strict=True)
    ]


def _all_gather(tensor: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    outputs = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(outputs, tensor, group=group)
    return outputs


def gather_samples(samples: Sequence[Sample], sources: Sequence[int]) -> list[Sample]:
    """Return the samples of the ranks in `sources`, in that order, on every rank of the world.

    The samples are sent as tensors, without their metadata; in a world of one rank they are
    returned unchanged. Collective.
    """
    if not is_distributed():
        return list(samples)
    messages = _gather_bytes(save(samples_to_tensors(samples)))
    return [sample for rank in sources for sample in samples_from_tensors(load(messages[rank]))]


def broadcast_samples(
    samples: Sequence[Sample] | None, group: ProcessGroup | None = None
) -> list[Sample]:
    """Return the samples of the group's rank 0 on every rank, without metadata. Collective.

    Args:
        samples: The samples on rank 0; None on the other ranks.
        group: Process group; None means the world.
    """
    if not is_distributed(group):
        return list(samples or ())
    data = save(samples_to_tensors(samples or ())) if dist.get_rank(group) == 0 else b""
    return samples_from_tensors(load(_broadcast_bytes(data, group=group)))


def samples_to_tensors(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Convert samples without their metadata to named tensors, for `samples_from_tensors`.

    Each tensor is the concatenation of the tensors of all samples. The names are part of the files
    and messages that contain samples.

    Returns:
        `heads`: int64 [N, 6], for each sample its prompt id, sample index, number of tokens, prompt
            length, index of its finish reason, and number of tokens with expert routing.
        `tokens`, `versions`, `logprobs`: the samples' tokens, weight versions and log-probs.
        `drawn`, `rewards`, `kept_counts`, `kept_ids`, `routes`: present if any sample has them.
        `grammars`: present if any sample has grammar spans; see `grammar_spans_to_tensor`.
        `branches`: int64, the number of branches of each sample; present if any sample has
            branches. The branches of a sample follow it in all other tensors.
        `data_prompts`, `data_prompt_lengths`: present if any sample has a `data_prompt`; the length
            of a sample without one is 0.
        `reports`: see `reports_to_tensor`; present if any sample has a report.
    """
    reports = reports_to_tensor(samples)
    branches = [len(sample.branches) for sample in samples]
    samples = [sequence for sample in samples for sequence in (sample, *sample.branches)]
    heads = [
        (
            *(sample.prompt_id, sample.sample_index, sample.tokens.numel(), sample.prompt_length),
            *(
                FINISH_REASONS.index(sample.finish_reason),
                0 if sample.expert_routing is None else len(sample.expert_routing),
            ),
        )
        for sample in samples
    ]

    # An empty tensor in front allows the concatenation of no samples, and sets the dtype.
    empty = torch.empty(0, dtype=torch.int64)
    tensors = {
        "heads": torch.tensor(heads, dtype=torch.int64).view(-1, 6),
        "tokens": torch.cat([empty, *(sample.tokens for sample in samples)]),
        "versions": torch.cat([empty, *(sample.weight_versions for sample in samples)]),
        "logprobs": torch.cat([torch.empty(0), *(sample.engine_logprobs for sample in samples)]),
    }
    if (generated_mask := concatenate_response_values(samples, "generated_mask")) is not None:
        tensors["drawn"] = generated_mask
    if (rewards := concatenate_response_values(samples, "rewards")) is not None:
        tensors["rewards"] = rewards
    if any(branches):
        tensors["branches"] = torch.tensor(branches)
    if reports is not None:
        tensors["reports"] = reports
    if (support := concatenate_support(samples)) is not None:
        tensors |= {"kept_counts": support.counts, "kept_ids": support.ids}
    recorded_routing = [
        sample.expert_routing for sample in samples if sample.expert_routing is not None
    ]
    if recorded_routing:
        tensors["routes"] = torch.cat(recorded_routing)
    data_prompts = [empty if one.data_prompt is None else one.data_prompt for one in samples]
    if any(len(prompt) for prompt in data_prompts):
        tensors["data_prompts"] = torch.cat(data_prompts)
        tensors["data_prompt_lengths"] = torch.tensor([len(prompt) for prompt in data_prompts])
    if (grammars := grammar_spans_to_tensor(samples)) is not None:
        tensors["grammars"] = grammars
    return tensors


def grammar_spans_to_tensor(samples: Sequence[Sample]) -> Tensor | None:
    """Return the grammar spans of samples as the bytes of a JSON text, uint8; None if no sample has
    any. The text contains each grammar once."""
    grammar_indices: dict[Grammar, int] = {}
    spans = [
        [row, span.start, span.end, grammar_indices.setdefault(span.grammar, len(grammar_indices))]
        for row, sample in enumerate(samples)
        for span in sample.grammar_spans
    ]
    if not spans:
        return None
    grammars = [[grammar.text, grammar.stop_token_ids] for grammar in grammar_indices]
    text = json.dumps({"grammars": grammars, "spans": spans})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def grammar_spans_from_bytes(text: bytes, count: int) -> list[tuple[GrammarSpan, ...]]:
    """Return the grammar spans of `count` samples from the bytes of `grammar_spans_to_tensor`."""
    content = json.loads(text)
    grammars = [Grammar(text, tuple(stop_ids)) for text, stop_ids in content["grammars"]]
    spans: list[list[GrammarSpan]] = [[] for _ in range(count)]
    for row, start, end, grammar in content["spans"]:
        spans[row].append(GrammarSpan(start, end, grammars[grammar]))
    return list(map(tuple, spans))


def samples_from_tensors(tensors: Mapping[str, Tensor]) -> list[Sample]:
    """Return the samples, without metadata, from which `samples_to_tensors` made the tensors."""
    heads = tensors["heads"]
    lengths = heads[:, 2].tolist()
    responses = (heads[:, 2] - heads[:, 3]).tolist()

    parts = {
        name: tensors[name].split(responses)
        for name in ("versions", "logprobs", "drawn", "rewards")
        if name in tensors
    }
    absent = [None] * len(responses)
    tokens = tensors["tokens"].split(lengths)
    supports = expert_routing = None
    if "kept_counts" in tensors:
        support = SamplingSupport.from_counts(tensors["kept_counts"], tensors["kept_ids"])
        indices = torch.arange(len(support.counts)).split(responses)
        supports = [support.select(index) for index in indices]
    if "routes" in tensors:
        expert_routing = tensors["routes"].split(heads[:, 5].tolist())
    data_prompts: list[Tensor | None] = [None] * len(responses)
    if "data_prompts" in tensors:
        parts_of_prompts = tensors["data_prompts"].split(tensors["data_prompt_lengths"].tolist())
        data_prompts = [prompt if len(prompt) else None for prompt in parts_of_prompts]
    grammar_spans: list[tuple[GrammarSpan, ...]] = [()] * len(responses)
    if "grammars" in tensors:
        grammar_spans = grammar_spans_from_bytes(
            tensors["grammars"].numpy().tobytes(), len(responses)
        )

    samples = [
        Sample(
            prompt_id=prompt_id,
            sample_index=sample_index,
            tokens=tokens[row],
            prompt_length=prompt_length,
            engine_logprobs=parts["logprobs"][row],
            weight_versions=parts["versions"][row],
            finish_reason=FINISH_REASONS[finish],
            sampling_support=None if supports is None else supports[row],
            expert_routing=expert_routing[row]
            if expert_routing is not None and routed_tokens
            else None,
            generated_mask=parts.get("drawn", absent)[row],
            rewards=parts.get("rewards", absent)[row],
            data_prompt=data_prompts[row],
            grammar_spans=grammar_spans[row],
        )
        for row, (prompt_id, sample_index, _, prompt_length, finish, routed_tokens) in enumerate(
            heads.tolist()
        )
    ]
    if "branches" in tensors:
        # Each sample is followed by its branches.
        rows = iter(samples)
        samples = [
            replace(next(rows), branches=tuple(itertools.islice(rows, count)))
            for count in tensors["branches"].tolist()
        ]
    return with_reports(samples, tensors.get("reports"))


def reports_to_tensor(samples: Sequence[Sample]) -> Tensor | None:
    """Return the samples' reports as a JSON list in UTF-8, uint8 [Q]; None if no sample has one."""
    reports = [None if sample.report is None else sample.report.to_json() for sample in samples]
    if not any(reports):
        return None
    return torch.frombuffer(bytearray(json.dumps(reports).encode()), dtype=torch.uint8)


def with_reports(samples: Sequence[Sample], reports: Tensor | None) -> list[Sample]:
    """Return the samples with their reports, from the result of `reports_to_tensor`.

    Raises KeyError, TypeError or ValueError if the tensor does not contain the samples' reports.
    """
    if reports is None:
        return list(samples)
    return [
        sample if fields is None else replace(sample, report=EpisodeReport.from_json(fields))
        for sample, fields in zip(samples, json.loads(reports.numpy().tobytes()), strict=True)
    ]
