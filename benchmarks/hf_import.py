"""Measure memory and time of loading a Hugging Face directory into a Megatron layout, where each
rank reads only its own slices.

The benchmark writes a random Llama model of several files and starts one process per rank. It
verifies a claim: the peak memory of a rank, minus the memory before the model was built, is at most
the size of its shard plus its largest tensor (`peak_over_limit` is at most 1). Pages of
memory-mapped files belong to the page cache and are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file

from aligner.launcher.rank_environment import FreePorts
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import weight_table
from aligner.schema import MegatronModelConfig, ParallelConfig


def make_shape(hidden: int, layers: int, vocabulary: int) -> ModelShape:
    heads = hidden // 64
    return ModelShape(
        layers,
        hidden,
        heads,
        heads // 2,
        64,
        11 * hidden // 4,
        vocabulary,
        4096,
        1e-5,
        1e4,
        False,
        (),
        0,
    )


def write_model(shape: ModelShape, directory: Path) -> None:
    """Write random weights to one file per layer, and one file for all weights outside the
    layers."""
    files: dict[str, dict[str, torch.Tensor]] = {}
    for spec in weight_table(shape):
        file = f"model-{'outside' if spec.layer is None else spec.layer}.safetensors"
        files.setdefault(file, {})[spec.name] = torch.randn(spec.shape)
    for file, tensors in files.items():
        save_file(tensors, directory / file)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def own_memory() -> int:
    """Return the anonymous memory of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


@contextmanager
def peak_memory(result: list[int], interval_s: float = 0.001) -> Iterator[None]:
    """Append the largest `own_memory` that occurs while the block runs to `result`."""
    peak, done = own_memory(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(interval_s):
            peak = max(peak, own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        result.append(max(peak, own_memory()))


def measure(
    rank: int, port: int, directory: str, shape: ModelShape, layout: ParallelConfig, as_json: bool
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(layout.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    from aligner.megatron import world as worlds
    from aligner.megatron.gpt_model import build_model
    from aligner.megatron.named_weights import NamedWeights

    torch.set_num_threads(1)
    world = worlds.initialize(layout, seed=1, timeout_s=120)
    before, peaks = own_memory(), []
    begin = time.perf_counter()
    with peak_memory(peaks):
        chunks = build_model(shape, world, "vocabulary", MegatronModelConfig(parallel=layout))
        weights = NamedWeights(chunks, shape, world, weight_table(shape))
        weights.load_directory(Path(directory))
    seconds = time.perf_counter() - begin
    sizes = [weights.read(name).numel() * 4 for name in weights]
    shard, tensor = sum(sizes), max(sizes)
    reports: list[dict[str, float | int | str]] = [{} for _ in range(layout.ranks)]
    mine = {
        "rank": rank,
        "shard_mib": shard / 2**20,
        "largest_tensor_mib": tensor / 2**20,
        "peak_mib": (peaks[0] - before) / 2**20,
        "peak_over_limit": (peaks[0] - before) / (shard + tensor),
        "seconds": seconds,
        "mib_per_s": shard / 2**20 / seconds,
    }
    dist.all_gather_object(reports, mine)
    if rank == 0:
        whole = sum(spec.numel * 4 for spec in weight_table(shape)) / 2**20
        for report in reports:
            line = {
                "benchmark": "hf_import",
                "model_mib": whole,
                "layout": f"TP{layout.tensor} PP{layout.pipeline}",
                **report,
            }
            text = "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in line.items()
            )
            print(json.dumps(line) if as_json else text)
    worlds.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensor", type=int, default=2, help="tensor parallel size (2)")
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline parallel size (2)")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size (1024)")
    parser.add_argument("--layers", type=int, default=8, help="number of layers (8)")
    parser.add_argument("--vocabulary", type=int, default=32000, help="vocabulary size (32000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    layout = ParallelConfig(tensor=args.tensor, pipeline=args.pipeline)
    shape = make_shape(args.hidden, args.layers, args.vocabulary)
    with tempfile.TemporaryDirectory() as directory, FreePorts() as ports:
        write_model(shape, Path(directory))
        mp.spawn(measure, (next(ports), directory, shape, layout, args.json), nprocs=layout.ranks)


if __name__ == "__main__":
    main()
