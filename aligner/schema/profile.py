"""Keys of the profiles of training steps: section `profile`."""

from dataclasses import dataclass

from aligner.schema.options import option


@dataclass
class ProfileConfig:
    """Profiles of training steps."""

    steps: list[int] = option(
        [],
        "Training steps to profile, such as `[3, 4]`, counted from 1. Profiles are stored in"
        " `profile/` in the run directory.",
    )
    ranks: list[int] = option([0], "Trainer ranks to profile.", read_if=".steps!=[]")
    tool: str = option(
        "torch",
        "Profiler. `torch`: torch's profiler writes a Chrome trace of each step. `nsys`: the steps"
        " are marked for NVIDIA Nsight Systems, which must have started the run (`nsys profile"
        " --capture-range=cudaProfilerApi --capture-range-end=repeat`).",
        choices=("torch", "nsys"),
        read_if=".steps!=[]",
    )
    memory: bool = option(
        False,
        "Whether to also store a snapshot of the GPU memory, with the allocations and frees of each"
        " step, for https://pytorch.org/memory_viz.",
        read_if=".steps!=[]",
    )
