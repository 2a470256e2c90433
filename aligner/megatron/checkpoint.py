"""A model's state on disk: weights, Adam's moments and the schedule, one safetensors file a rank.

A directory appears under its final name only when every rank's file is in it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from aligner.errors import AlignerError
from aligner.megatron.optimizer import adam_state
from aligner.megatron.runner import ModelRunner

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.safetensors"


def _layout(runner: ModelRunner) -> dict[str, int]:
    layout = runner.world.layout
    return {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data}


def save_runner(runner: ModelRunner, directory: Path) -> None:
    """Every rank writes its state; the directory is complete or absent. Collective over the role's world."""
    world = runner.world
    temporary = directory.with_name(directory.name + ".tmp")
    if world.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    world.barrier()
    state = adam_state(runner.optimizer)
    tensors: dict[str, Tensor] = {}
    for name, parameter in runner.model.named_parameters():
        tensors[name] = parameter.detach()
        for key in _MOMENTS:
            if key in state.get(parameter, {}):
                tensors[f"{name}/{key}"] = torch.as_tensor(state[parameter][key])
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, _file(temporary, world.rank))
    if world.rank == 0:
        manifest = {"layout": _layout(runner), "updates": runner.updates, "scheduler_steps": runner.scheduler.num_steps}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
        temporary.replace(directory)
    world.barrier()


def load_runner(runner: ModelRunner, directory: Path) -> None:
    """Read what `save_runner` wrote.

    Raises AlignerError when the checkpoint is absent, of another layout, or lacks a tensor (all named).
    """
    manifest_file = directory / "manifest.json"
    if not manifest_file.exists():
        raise AlignerError(f"{directory}: no checkpoint here (manifest.json is missing)")
    manifest = json.loads(manifest_file.read_text())
    if manifest["layout"] != _layout(runner):
        raise AlignerError(f"{directory}: saved at layout {manifest['layout']}, cannot be read at {_layout(runner)}")
    state = adam_state(runner.optimizer)
    with safe_open(str(_file(directory, runner.world.rank)), framework="pt") as handle:
        stored = set(handle.keys())
        missing = [name for name, _ in runner.model.named_parameters() if name not in stored]
        if missing:
            raise AlignerError(f"{directory}: the checkpoint lacks {', '.join(missing)}")
        for name, parameter in runner.model.named_parameters():
            parameter.data.copy_(handle.get_tensor(name))
            moments = {key: handle.get_tensor(f"{name}/{key}") for key in _MOMENTS if f"{name}/{key}" in stored}
            state.setdefault(parameter, {}).update(moments)
    _set_adam_state(runner, state)
    runner.updates = manifest["updates"]
    runner.scheduler.num_steps = 0
    runner.scheduler.step(increment=manifest["scheduler_steps"])


def _set_adam_state(runner: ModelRunner, state: dict[torch.nn.Parameter, dict[str, Tensor]]) -> None:
    for part in getattr(runner.optimizer, "chained_optimizers", [runner.optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if state.get(parameter):
                    part.optimizer.state[parameter] = state[parameter]
