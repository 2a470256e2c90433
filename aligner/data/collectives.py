"""Data between ranks: as tensors and JSON, never as pickled objects."""

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.data.types import FINISH_REASONS, Sample

T = TypeVar("T")


def is_distributed(group: ProcessGroup | None = None) -> bool:
    """Whether there is any other rank in the group (None: in the world)."""
    return dist.is_initialized() and dist.get_world_size(group) > 1


def dealt(values: Sequence[T]) -> list[T]:
    """This rank's share of what the world's ranks deal with together."""
    if not is_distributed():
        return list(values)
    return list(values[dist.get_rank() :: dist.get_world_size()])


def broadcast_json(value: Any, source: int = 0, group: ProcessGroup | None = None) -> Any:
    """The JSON value of the group's rank `source` on every rank. Collective."""
    if not is_distributed(group):
        return value
    data = json.dumps(value).encode() if dist.get_rank(group) == source else b""
    length = torch.tensor([len(data)])
    dist.broadcast(length, group=group, group_src=source)
    buffer = torch.frombuffer(bytearray(data.ljust(int(length))), dtype=torch.uint8)
    dist.broadcast(buffer, group=group, group_src=source)
    return json.loads(buffer.numpy().tobytes())


def gather_json(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's JSON value, in rank order, on every rank of the group. Collective."""
    if not is_distributed(group):
        return [value]
    data = json.dumps(value).encode()
    width = int(max(_all_gathered(torch.tensor([len(data)]), group)))
    buffers = _all_gathered(torch.frombuffer(bytearray(data.ljust(width)), dtype=torch.uint8), group)
    return [json.loads(buffer.numpy().tobytes()) for buffer in buffers]


def _all_gathered(tensor: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def gather_samples(samples: Sequence[Sample], sources: Sequence[int]) -> list[Sample]:
    """The samples of the ranks in `sources`, in that order, on every rank of the world.

    Every rank calls it and every source holds equally many; tensors travel, no pickled objects.
    """
    if not is_distributed():
        return list(samples)
    widths = torch.tensor([max(sample.tokens.numel() for sample in samples), len(samples)])
    dist.all_reduce(widths, op=dist.ReduceOp.MAX)
    width, count = int(widths[0]), int(widths[1])
    if len(samples) != count:
        raise ValueError(f"rank {dist.get_rank()} has {len(samples)} samples, another has {count}")
    integers, logprobs = (_all_gathered(tensor) for tensor in samples_to_tensors(samples, width))
    return [sample for rank in sources for sample in samples_from_tensors(integers[rank], logprobs[rank])]


def broadcast_samples(samples: Sequence[Sample] | None) -> list[Sample]:
    """Rank 0's samples on every rank of the world; the others give None. Collective."""
    if not is_distributed():
        return list(samples or ())
    width = max((sample.tokens.numel() for sample in samples or ()), default=0)
    count, width = broadcast_json([len(samples or ()), width])
    integers, logprobs = samples_to_tensors(samples or (), width)
    if dist.get_rank():
        integers, logprobs = integers.new_zeros(count, integers.shape[1]), logprobs.new_zeros(count, width)
    dist.broadcast(integers, 0)
    dist.broadcast(logprobs, 0)
    return samples_from_tensors(integers, logprobs)


def samples_to_tensors(samples: Sequence[Sample], width: int) -> tuple[Tensor, Tensor]:
    """int64 [N, 5 + 2·width]: prompt id, sample index, length, prompt length, finish, tokens, versions; float32 [N, width]."""
    integers = torch.zeros(len(samples), 5 + 2 * width, dtype=torch.int64)
    logprobs = torch.zeros(len(samples), width)
    for row, sample in enumerate(samples):
        length, response = sample.tokens.numel(), sample.engine_logprobs.numel()
        finish = FINISH_REASONS.index(sample.finish_reason)
        integers[row, :5] = torch.tensor([sample.prompt_id, sample.sample_index, length, sample.prompt_length, finish])
        integers[row, 5 : 5 + length] = sample.tokens
        integers[row, 5 + width : 5 + width + response] = sample.weight_versions
        logprobs[row, :response] = sample.engine_logprobs
    return integers, logprobs


def samples_from_tensors(integers: Tensor, logprobs: Tensor) -> list[Sample]:
    """The samples that `samples_to_tensors` made these of."""
    samples, width = [], logprobs.shape[1]
    for row, scores in zip(integers, logprobs, strict=True):
        prompt_id, sample_index, length, prompt_length, finish = row[:5].tolist()
        response = length - prompt_length
        tokens, versions, reason = row[5 : 5 + length], row[5 + width : 5 + width + response], FINISH_REASONS[finish]
        samples.append(Sample(prompt_id, sample_index, tokens, prompt_length, scores[:response], versions, reason))
    return samples
