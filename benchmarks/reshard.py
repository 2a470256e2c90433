"""Compare weight sync from a trainer layout to an engine layout with a plain transfer of the same
number of bytes.

The benchmark starts one process per rank on this machine, connected by gloo. Trainer and engine
have separate process groups, or share one with `--colocated`. The plain transfer moves the same
number of bytes between the same ranks over the same link, from contiguous buffer to contiguous
buffer; bytes that stay on a rank are copied. Weight syncs and plain transfers alternate. Times are
those of the slowest rank, as the median over `--repeats`.

- `link_fraction`: time of the plain transfer as a share of the time of the weight sync.
- `peak_extra_bytes`: largest increase of a rank's resident memory during a weight sync, measured
  with the kernel's high-water mark.
- `staging_bytes`: size of the buffers that the publisher reports.
- `verify_s`: duration of the comparison of checksums in the last verified weight sync; with
  `--verify sync`, every weight sync is verified, and `publish_s` includes this duration.
- `staged_bytes`: size of the second set of weights, which lets the engine serve the old version
  during a weight sync; it is allocated permanently.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import TensorSpec
from aligner.resharding.publisher import Publisher
from aligner.resharding.transfer_plan import TransferPlan, plan_resharding
from aligner.resharding.transport import Link, slice_shape
from aligner.resharding.verify import compute_checksums, compute_expected, find_different
from aligner.resharding.weight_update import ExpectedSlice
from aligner.schema import EngineParallelConfig, ParallelConfig
from benchmarks.models import MODELS, shape_of

SHORT = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert"}
PLAIN_MESSAGE = 32 << 20
TIMEOUT = timedelta(seconds=120)


class Receiver:
    """Two sets of an engine's weights. An update writes one set, and its commit exchanges the
    two."""

    group_bytes = None

    def __init__(self, plan: TransferPlan, rank: int) -> None:
        shapes = {
            name: slice_shape(plan.specs[name], piece)
            for name, piece in plan.target.get(rank, {}).items()
        }
        self.serving, self._written = (
            {name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(2)
        )
        self._verified: Mapping[str, ExpectedSlice] = {}

    @property
    def staged_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._written.values())

    def begin_update(self, version: int) -> Receiver:
        return self

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        return self._written

    def load(self, names: Sequence[str]) -> None:
        """Do nothing: the tensors have been written to their final memory."""

    def commit(self) -> None:
        self.serving, self._written = self._written, self.serving

    def abort(self) -> None:
        """Do nothing: the update has not changed the current weights."""

    def find_wrong_weights(self, expected: Mapping[str, ExpectedSlice]) -> Sequence[str]:
        found = compute_checksums(self.serving, expected, torch.float32)
        self._verified = {
            name: replace(expected[name], checksum=value) for name, value in found.items()
        }
        return [name for name, each in expected.items() if found.get(name) != each.checksum]

    def find_changed_weights(self) -> Sequence[str]:
        return find_different(self.serving, self._verified, torch.float32)

    def discard_weights(self, reason: str) -> None:
        """Do nothing: the benchmark ends with the error."""


class Plain:
    """A plain transfer of as many bytes between the same ranks, in large messages from contiguous
    buffers."""

    def __init__(self, plan: TransferPlan, link: Link) -> None:
        def buffer(source: int, target: int) -> tuple[Tensor, ...]:
            size = plan.itemsize * sum(
                transfer.numel for transfer in plan.transfers_between(source, target)
            )
            # Unwritten zero pages all map to one physical page, which stays in the CPU cache.
            return torch.full((size,), 1, dtype=torch.uint8).split(PLAIN_MESSAGE) if size else ()

        self._link, rank, size = link, link.rank, link.size
        self._local = [(part, torch.zeros_like(part)) for part in buffer(rank, rank)]
        self._rounds = [
            (to, buffer(rank, to), from_, buffer(from_, rank))
            for to, from_ in (
                ((rank + distance) % size, (rank - distance) % size) for distance in range(1, size)
            )
        ]

    def run(self) -> float:
        """Transfer all bytes, and return the time on this rank in seconds."""
        begin = time.perf_counter()
        for source, target in self._local:
            target.copy_(source)
        posted = 0
        for to, sending, from_, receiving in self._rounds:
            for place in range(max(len(sending), len(receiving))):
                self._link.post(
                    [(part, to) for part in sending[place : place + 1]],
                    [(part, from_) for part in receiving[place : place + 1]],
                )
                posted += 1
                if posted == 2:
                    self._link.complete()
                    posted -= 1
        for _ in range(posted):
            self._link.complete()
        return time.perf_counter() - begin


def memory(what: str) -> int:
    """Return a figure of this process's memory in bytes; `what` is its name in
    /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what + ":"))


def most(link: Link, value: float) -> float:
    """Return the largest value of all ranks. All ranks have reached this call when it returns."""
    values = torch.zeros(link.size, dtype=torch.float64)
    values[link.rank] = value
    link.all_reduce(values)
    return float(values.max())


def join(args: argparse.Namespace, plan: TransferPlan, rank: int, port: int) -> Link:
    """Join the process group of this rank's role, and return a link between all ranks."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    trainers = args.source.ranks
    role, at, size = (
        ("trainer", rank, trainers)
        if rank < trainers
        else ("engine", rank - trainers, args.target.ranks)
    )
    dist.init_process_group("gloo", store=PrefixStore(role, store), rank=at, world_size=size)
    return Link(store, rank, plan.labels, timeout=TIMEOUT)


class Shards:
    """This rank's weights of a trainer; replicas have equal weights.

    The query, key and value weights of a layer are interleaved in one parameter, as in
    megatron-core, so reading one of them requires a copy.
    """

    def __init__(self, plan: TransferPlan, shape: ModelShape, rank: int) -> None:
        self._slices, self._specs = plan.source.get(rank, {}), plan.specs
        self._queries, self._head = shape.num_heads // shape.num_kv_heads, shape.head_dim
        self._held: dict[str, Tensor] = {}
        self.copied = frozenset(
            name for name in self._slices if plan.specs[name].part in ("query", "key", "value")
        )
        for index, spec in enumerate(plan.table):
            if (piece := self._slices.get(spec.name)) is not None:
                whole = torch.rand(spec.shape, generator=torch.Generator().manual_seed(index))
                mine = (
                    whole
                    if piece.axis is None
                    else whole.narrow(piece.axis, piece.start, piece.stop - piece.start)
                )
                if spec.name in self.copied:
                    place = self._part(spec, rows=len(mine))
                    place.copy_(mine.reshape(place.shape))
                else:
                    self._held[spec.name] = mine.clone()

    def read(self, name: str) -> Tensor:
        """Return this rank's slice of a weight."""
        if name not in self.copied:
            return self._held[name]
        return self._part(self._specs[name]).reshape(
            slice_shape(self._specs[name], self._slices[name])
        )

    def _part(self, spec: TensorSpec, rows: int = 0) -> Tensor:
        """Return the view of a query, key or value weight in its layer's parameter.

        The first call for a layer allocates the parameter; `rows` is then the number of rows of the
        weight.
        """
        if spec.parameter not in self._held:
            groups = rows // self._head // (self._queries if spec.part == "query" else 1)
            self._held[spec.parameter] = torch.empty(
                groups, self._queries + 2, self._head, *spec.shape[1:]
            )
        fused = self._held[spec.parameter]
        if spec.part == "query":
            return fused[:, : self._queries]
        return fused[:, self._queries + (spec.part == "value")]


def measure(rank: int, port: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    begin = time.perf_counter()
    plan = make_plan(args)
    planning = time.perf_counter() - begin
    link = join(args, plan, rank, port)
    shards, receiver, plain = (
        Shards(plan, shape_of(args.model), rank),
        Receiver(plan, rank),
        Plain(plan, link),
    )
    publisher = Publisher(
        plan,
        link,
        read=shards.read if rank in plan.source else None,
        begin_update=receiver.begin_update if rank in plan.target else None,
        bucket_bytes=args.bucket_mib << 20,
        held_weights=receiver if rank in plan.target else None,
        verify=args.verify,
        copied_names=shards.copied,
    )
    stats = first = publisher.publish(0)  # verified, and warms up
    plain.run()
    publishing, moving, extra, staging = [], [], [], first.staging_bytes
    for version in range(1, args.repeats + 1):
        most(link, 0)
        moving.append(most(link, plain.run()))
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = memory("VmRSS")
        most(link, 0)
        stats = publisher.publish(version)
        extra.append(memory("VmHWM") - before)
        staging = max(staging, stats.staging_bytes)
        publishing.append(most(link, stats.seconds))
    with link.agreement("the weights of the engine differ from those of the trainer"):
        expected = compute_expected(plan, link, torch.float32, shards.read)
        if names := find_different(receiver.serving, expected, torch.float32):
            raise AlignerError(", ".join(names))
    figures = {
        "peak_extra_bytes": int(most(link, max(extra))),
        "staging_bytes": int(most(link, staging)),
        "staged_bytes": int(most(link, receiver.staged_bytes)),
        "verified": True,
        "verify_s": most(link, stats.verify_seconds or first.verify_seconds or 0.0),
    }
    if rank == 0:
        moved = plan.itemsize * sum(transfer.numel for transfer in plan.transfers)
        report(
            args,
            plan,
            moved,
            {"plan_s": planning, "publish_s": median(publishing), "plain_s": median(moving)}
            | figures,
        )
    most(link, 0)
    dist.destroy_process_group()


def report(
    args: argparse.Namespace, plan: TransferPlan, moved: int, figures: dict[str, Any]
) -> None:
    """Print the figures, as one JSON object or as text."""
    result = {
        "benchmark": "reshard",
        "model": args.model,
        "source": args.source_text,
        "target": args.target_text,
        "worlds": 1 if args.colocated else 2,
        "bucket_bytes": args.bucket_mib << 20,
        "bytes_remote": (
            plan.itemsize * sum(one.numel for one in plan.transfers if one.source != one.target)
        ),
        "bytes_local": (
            plan.itemsize * sum(one.numel for one in plan.transfers if one.source == one.target)
        ),
        "gb_per_s": moved / figures["publish_s"] / 1e9,
        "link_gb_per_s": moved / figures["plain_s"] / 1e9,
        "link_fraction": figures["plain_s"] / figures["publish_s"],
        **figures,
    }
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:>18}  {value:.4g}" if isinstance(value, float) else f"{key:>18}  {value}")


def make_plan(args: argparse.Namespace) -> TransferPlan:
    shape = shape_of(args.model)
    first = 0 if args.colocated else args.source.ranks
    return plan_resharding(shape, args.source, args.target, first_engine_rank=first)


def layout(text: str, allowed: Sequence[str]) -> dict[str, Any]:
    """Parse a layout such as `tp=2,pp=2`, and return the sizes by name."""
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in allowed or not size.isdigit() or int(size) < 1:
            raise SystemExit(
                f"layout {text}: got {part!r}, expected NAME=SIZE, where NAME is one of"
                f" {', '.join(allowed)} and SIZE is a positive integer"
            )
        sizes[SHORT[name]] = int(size)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source",
        default="tp=2,pp=2",
        help="trainer layout: sizes of tp, pp, dp, cp and ep (tp=2,pp=2)",
    )
    parser.add_argument(
        "--target", default="tp=2,dp=1", help="engine layout: sizes of tp and dp (tp=2,dp=1)"
    )
    parser.add_argument(
        "--verify",
        choices=("first", "sync"),
        default="first",
        help="weight syncs that are verified by checksums: the first, or each (first)",
    )
    parser.add_argument(
        "--model", choices=MODELS, default="llama_125m", help="model shape (llama_125m)"
    )
    parser.add_argument(
        "--colocated", action="store_true", help="run the engine on the first ranks of the trainer"
    )
    parser.add_argument("--bucket-mib", type=int, default=64, help="bucket size in MiB (64)")
    parser.add_argument("--repeats", type=int, default=20, help="number of measurements (20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    args.source_text, args.target_text = args.source, args.target
    args.source = ParallelConfig(**layout(args.source, tuple(SHORT)))
    args.target = EngineParallelConfig(**layout(args.target, ("tp", "dp")))
    if args.colocated and args.target.ranks > args.source.ranks:
        parser.error(
            f"--target {args.target_text}: got {args.target.ranks} ranks; with --colocated it must"
            f" have at most as many ranks as --source ({args.source.ranks})"
        )
    try:
        make_plan(args)
    except AlignerError as error:
        parser.error(str(error))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = args.source.ranks + (0 if args.colocated else args.target.ranks)
    spawn(measure, (store.port, args), nprocs=ranks)


if __name__ == "__main__":
    main()
