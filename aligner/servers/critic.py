"""The critic role: values and value-model updates behind Triton."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from aligner.algorithms.losses import value_loss
from aligner.config.paths import model_directory, run_paths
from aligner.config.schema import Config
from aligner.errors import AlignerError
from aligner.servers.backend import ValueModel
from aligner.servers.executor import Handler
from aligner.servers.host import Serve
from aligner.servers.ledger import SequenceError, UpdateLedger
from aligner.servers.protocol import (
    CRITIC_INFER,
    CRITIC_SAVE,
    CRITIC_TRAIN,
    PROTOCOL_VERSION,
    EndpointSpec,
    array_text,
    text_array,
)
from aligner.servers.serving import Caller, model_limits, serve_role, tensor
from aligner.servers.validation import Limits


def serve_critic(config: Config) -> None:
    """One rank of the critic, until it is told to stop."""
    from aligner.megatron.value_model import build_value_model
    from aligner.megatron.world import initialize

    world = initialize(config.critic.parallel, config.seed, config.cluster.collective_timeout_s)
    model = build_value_model(config, "critic", world, functools.partial(value_loss, clip=config.algorithm.value_clip))
    run_critic(config, model, model_limits(config, model_directory(config), model.vocab_size))


def run_critic(config: Config, model: ValueModel, limits: Limits) -> None:
    """Serve a value model as the critic; every rank of its world calls this."""
    ranks = CriticRank(config, model)
    serve_role(
        "critic",
        config,
        handlers=ranks.handlers,
        endpoints=_endpoints,
        operations=("version", "checkpoint", "begin_checkpoint", "finish_checkpoint", "restore"),
        limits=limits,
    )


class CriticRank:
    """One rank's side of the critic. All ranks hold the same ledger, so that they accept and refuse alike."""

    def __init__(self, config: Config, model: ValueModel) -> None:
        self._config = config
        self._model = model
        self._ledger = UpdateLedger()
        self._saving: tuple[Path, UpdateLedger] | None = None

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What each op does."""
        return {
            "infer": self._model.values,
            "train": self.train,
            "version": self.version,
            "checkpoint": self.checkpoint,
            "begin_checkpoint": self.begin_checkpoint,
            "finish_checkpoint": self.finish_checkpoint,
            "restore": self.restore,
        }

    def train(
        self,
        tokens: Tensor,
        returns: Tensor,
        old_values: Tensor,
        mask: Tensor,
        run_id: str | None,
        sequence_number: int | None,
    ) -> dict[str, float]:
        """Apply an update once; a repeat of the last one returns its recorded result. Raises SequenceError."""
        if sequence_number is None:
            if not self._config.server.accept_unnumbered:
                raise SequenceError("sequence_number: missing; send one, or configure server.accept_unnumbered=true")
            return self._model.train(tokens, returns, old_values, mask)
        if self._ledger.is_repeat(run_id, sequence_number):
            assert self._ledger.result is not None
            return self._ledger.result
        result = self._model.train(tokens, returns, old_values, mask)
        self._ledger.record(run_id, sequence_number, result)
        return result

    def version(self) -> dict[str, Any]:
        """Optimizer steps taken, and the last applied update."""
        return {
            "protocol": PROTOCOL_VERSION,
            "version": self._model.version,
            "sequence_number": self._ledger.last,
            "run_id": self._ledger.run_id,
        }

    def begin_checkpoint(self, step: int) -> dict[str, Any]:
        """Begin to save as the critic's part of the run's checkpoint `step`; requests go on being served."""
        self.finish_checkpoint()
        directory = self._directory(step)
        directory.parent.mkdir(parents=True, exist_ok=True)
        self._model.begin_save(directory)
        self._saving = (directory, replace(self._ledger))
        return {"step": step, **self.version()}

    def finish_checkpoint(self) -> dict[str, Any]:
        """Wait until the checkpoint that was begun, if any, is complete."""
        saving, self._saving = self._saving, None
        self._model.finish_save()
        # After the weights: a checkpoint with a ledger is complete.
        if saving is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            directory, ledger = saving
            ledger.save(_ledger_path(directory))
        return self.version()

    def checkpoint(self, step: int | None = None) -> dict[str, Any]:
        """Save as the critic's part of the run's checkpoint `step`, the optimizer steps taken when None."""
        begun = self.begin_checkpoint(self._model.version if step is None else step)
        self.finish_checkpoint()
        return begun

    def restore(self, step: int) -> dict[str, Any]:
        """Go back to the run's checkpoint `step`. Raises AlignerError when it is missing or incomplete."""
        self.finish_checkpoint()
        directory = self._directory(step)
        if not directory.is_dir():
            raise AlignerError(f"restore: there is no critic checkpoint {directory}")
        ledger = UpdateLedger.load(_ledger_path(directory))
        self._model.load(directory)
        self._ledger = ledger
        return {"step": step, **self.version()}

    def _directory(self, step: int) -> Path:
        return run_paths(self._config).checkpoint(step, "critic")


def _ledger_path(directory: Path) -> Path:
    return directory.with_name("critic_updates.json")


def _endpoints(call: Caller) -> Mapping[EndpointSpec, Serve]:
    def infer(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
        values = call("infer", {"tokens": tensor(arrays["tokens"]), "lengths": tensor(arrays["sequence_lengths"][:, 0])})
        return {"values": values.float().cpu().numpy()}

    def train(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
        """One update; its statistics beside NeMo-Aligner's `loss_mean`."""
        stats = call(
            "train",
            {
                "tokens": tensor(arrays["tokens"]),
                "returns": tensor(arrays["returns"]),
                "old_values": tensor(arrays["prev_values"]),
                "mask": tensor(arrays["mask"]).bool(),
            },
            run_id=array_text(arrays["run_id"]) if "run_id" in arrays else None,
            sequence_number=int(arrays["sequence_number"][0]) if "sequence_number" in arrays else None,
        )
        return {"loss_mean": np.array([stats["loss"]], dtype=np.float32), "stats": text_array(json.dumps(stats))}

    def save(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
        call("checkpoint")
        return {"status": np.zeros(1, dtype=np.int64)}

    return {CRITIC_INFER: infer, CRITIC_TRAIN: train, CRITIC_SAVE: save}
