"""Data between ranks: as tensors and JSON, never as pickled objects."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.data.types import FINISH_REASONS, KeptTokens, Sample, kept_by, of_responses

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
    return json.loads(
        _broadcast_bytes(
            json.dumps(value).encode() if dist.get_rank(group) == source else b"", source, group
        )
    )


def _broadcast_bytes(data: bytes, source: int = 0, group: ProcessGroup | None = None) -> bytes:
    length = torch.tensor([len(data)])
    dist.broadcast(length, group=group, group_src=source)
    buffer = torch.frombuffer(bytearray(data.ljust(int(length))), dtype=torch.uint8)
    dist.broadcast(buffer, group=group, group_src=source)
    return buffer.numpy().tobytes()


def gather_json(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's JSON value, in rank order, on every rank of the group. Collective."""
    if not is_distributed(group):
        return [value]
    return [json.loads(data) for data in _gathered_bytes(json.dumps(value).encode(), group)]


def _gathered_bytes(data: bytes, group: ProcessGroup | None = None) -> list[bytes]:
    lengths = [int(length) for length in _all_gathered(torch.tensor([len(data)]), group)]
    buffers = _all_gathered(
        torch.frombuffer(bytearray(data.ljust(max(lengths))), dtype=torch.uint8), group
    )
    return [
        buffer.numpy().tobytes()[:length] for buffer, length in zip(buffers, lengths, strict=True)
    ]


def _all_gathered(tensor: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def gather_samples(samples: Sequence[Sample], sources: Sequence[int]) -> list[Sample]:
    """The samples of the ranks in `sources`, in that order, on every rank of the world.

    Every rank calls it; tensors travel, no pickled objects.
    """
    if not is_distributed():
        return list(samples)
    gathered = _gathered_bytes(save(samples_to_tensors(samples)))
    return [sample for rank in sources for sample in samples_from_tensors(load(gathered[rank]))]


def broadcast_samples(
    samples: Sequence[Sample] | None, group: ProcessGroup | None = None
) -> list[Sample]:
    """The samples of the group's rank 0 (None: the world's), without metadata, on every rank; the
    others give None.

    Collective.
    """
    if not is_distributed(group):
        return list(samples or ())
    data = save(samples_to_tensors(samples or ())) if dist.get_rank(group) == 0 else b""
    return samples_from_tensors(load(_broadcast_bytes(data, group=group)))


def samples_to_tensors(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """What `samples_from_tensors` makes the same samples of, but for their metadata: tensors of all
    of them, end to end.

    `heads` is int64 [N, 6]: prompt id, sample index, length, prompt length, finish reason, and
    tokens with routes. Branches follow their samples, and are counted in `branches`, int64, one a
    sample, which is there where any has some.
    """
    branches = [len(sample.branches) for sample in samples]
    samples = [each for sample in samples for each in (sample, *sample.branches)]
    heads = [
        (
            *(sample.prompt_id, sample.sample_index, sample.tokens.numel(), sample.prompt_length),
            *(
                FINISH_REASONS.index(sample.finish_reason),
                0 if sample.routes is None else len(sample.routes),
            ),
        )
        for sample in samples
    ]
    none = torch.empty(0, dtype=torch.int64)
    tensors = {
        "heads": torch.tensor(heads, dtype=torch.int64).view(-1, 6),
        "tokens": torch.cat([none, *(sample.tokens for sample in samples)]),
        "versions": torch.cat([none, *(sample.weight_versions for sample in samples)]),
        "logprobs": torch.cat([torch.empty(0), *(sample.engine_logprobs for sample in samples)]),
    }
    for name in ("drawn", "rewards"):
        if (told := of_responses(samples, name)) is not None:
            tensors[name] = told
    if any(branches):
        tensors["branches"] = torch.tensor(branches)
    if (kept := kept_by(samples)) is not None:
        tensors |= {"kept_counts": kept.counts, "kept_ids": kept.ids}
    if routes := [sample.routes for sample in samples if sample.routes is not None]:
        tensors["routes"] = torch.cat(routes)
    return tensors


def samples_from_tensors(tensors: Mapping[str, Tensor]) -> list[Sample]:
    """The samples that `samples_to_tensors` made these of, without metadata."""
    heads = tensors["heads"]
    lengths, responses = heads[:, 2].tolist(), (heads[:, 2] - heads[:, 3]).tolist()
    parts = {
        name: tensors[name].split(responses)
        for name in ("versions", "logprobs", "drawn", "rewards")
        if name in tensors
    }
    nothing = [None] * len(responses)
    tokens = tensors["tokens"].split(lengths)
    kept = routes = None
    if "kept_counts" in tensors:
        of_all = KeptTokens.in_order(tensors["kept_counts"], tensors["kept_ids"])
        places = torch.arange(len(of_all.counts)).split(responses)
        kept = [of_all.at(place) for place in places]
    if "routes" in tensors:
        routes = tensors["routes"].split(heads[:, 5].tolist())
    samples = [
        Sample(
            prompt_id=prompt_id,
            sample_index=sample_index,
            tokens=tokens[row],
            prompt_length=prompt_length,
            engine_logprobs=parts["logprobs"][row],
            weight_versions=parts["versions"][row],
            finish_reason=FINISH_REASONS[finish],
            kept=None if kept is None else kept[row],
            routes=routes[row] if routes is not None and routed else None,
            drawn=parts.get("drawn", nothing)[row],
            rewards=parts.get("rewards", nothing)[row],
        )
        for row, (prompt_id, sample_index, _, prompt_length, finish, routed) in enumerate(
            heads.tolist()
        )
    ]
    if "branches" not in tensors:
        return samples
    rows = iter(samples)
    return [
        replace(next(rows), branches=tuple(itertools.islice(rows, count)))
        for count in tensors["branches"].tolist()
    ]
