"""Seconds to publish a SmolLM2-135M-shaped trainer's fp32 shards into an engine's layout, and to verify them by checksum.

One process a rank over gloo on this machine. The seconds are the slowest rank's, the best of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import socket

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from aligner.config.model_shape import ModelShape
from aligner.config.schema import EngineParallel, Parallel
from aligner.config.weights import engine_slices, trainer_slices, weight_table
from aligner.resharding.plan import plan_transfers
from aligner.resharding.resharder import Resharder
from aligner.resharding.transport import slice_shape
from aligner.resharding.verify import verify

SHAPE = ModelShape(30, 576, 9, 3, 64, 1536, 49152, 8192, 1e-5, 100000.0, True, (), 0)


def slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def measure(
    rank: int, port: int, trainer: Parallel, engine: EngineParallel, bucket_mib: int, repeats: int, as_json: bool
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=trainer.ranks)
    table = weight_table(SHAPE)
    begin = time.perf_counter()
    plan = plan_transfers(
        table,
        {at: trainer_slices(table, SHAPE.num_layers, trainer, at) for at in range(trainer.ranks)},
        {at: engine_slices(table, engine, at) for at in range(engine.ranks)},
    )
    resharder = Resharder(plan, rank, bucket_bytes=bucket_mib << 20)
    planning = time.perf_counter() - begin
    torch.manual_seed(0)  # replicas hold the same values: a slice's values depend on its tensor alone
    shards = {
        spec.name: torch.full(slice_shape(spec, plan.source[rank][spec.name]), float(index + 1))
        for index, spec in enumerate(table)
        if spec.name in plan.source[rank]
    }
    views = {spec.name: torch.zeros(slice_shape(spec, plan.target[rank][spec.name])) for spec in table}
    publishing, verifying = [], []
    for _ in range(repeats):
        dist.barrier()
        stats = resharder.publish(shards.__getitem__, views)
        publishing.append(slowest(stats.seconds))
        dist.barrier()
        begin = time.perf_counter()
        verify(plan, rank, shards.__getitem__, views)
        verifying.append(slowest(time.perf_counter() - begin))
    if rank == 0:
        result: dict[str, str | float] = {
            "trainer": f"TP{trainer.tensor} PP{trainer.pipeline} DP{trainer.data}",
            "engine": f"TP{engine.tensor} DP{engine.data}",
            "bucket_mib": bucket_mib,
            "parameters": sum(spec.numel for spec in table),
            "plan_s": planning,
            "bytes_remote": sum(plan.bytes_received(at) for at in range(engine.ranks)),
            "bytes_local": sum(plan.bytes_local(at) for at in range(engine.ranks)),
            "publish_s": min(publishing),
            "verify_s": min(verifying),
        }
        if as_json:
            print(json.dumps({"benchmark": "resharding", **result}))
        else:
            print(
                "  ".join(
                    f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items()
                )
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", type=int, nargs=3, default=[1, 2, 1], metavar=("TP", "PP", "DP"))
    parser.add_argument("--engine", type=int, nargs=2, default=[1, 2], metavar=("TP", "DP"))
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    trainer = Parallel(tensor=args.trainer[0], pipeline=args.trainer[1], data=args.trainer[2])
    engine = EngineParallel(tensor=args.engine[0], data=args.engine[1])
    if trainer.ranks != engine.ranks:
        parser.error(f"the trainer has {trainer.ranks} ranks, the engine {engine.ranks}: a colocated engine's must be equal")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(measure, (port, trainer, engine, args.bucket_mib, args.repeats, args.json), nprocs=trainer.ranks)


if __name__ == "__main__":
    main()
