"""The critic role: values and value-model updates behind Triton, and the reward beside them where
it is served there too."""

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

from aligner.algorithms.policy_losses import value_loss
from aligner.data.claim import write_as, writing
from aligner.errors import AlignerError
from aligner.models.model_source import critic_directory
from aligner.paths import run_paths
from aligner.schema import Config
from aligner.schema.reward_sources import has_reward_model
from aligner.servers.critic_client import RunId, SequenceError, UpdateLedger
from aligner.servers.rank_commands import Handler, RowJoin, rank_handler
from aligner.servers.reward_server import Scoring, build_scoring, narrower
from aligner.servers.serving import Caller, Endpoints, model_limits, serve_role, tensor
from aligner.servers.triton_host import Serve
from aligner.servers.validation import Limits
from aligner.servers.value_models import DeviceSharing, ValueModel
from aligner.servers.wire_protocol import (
    CRITIC_INFER,
    CRITIC_INFER_WITH_REWARD,
    CRITIC_SAVE,
    CRITIC_TRAIN,
    PROTOCOL_VERSION,
    REWARD_MODEL,
    EndpointSpec,
    InstanceError,
    array_text,
    text_array,
)

_LEDGER = "updates.json"
_OPERATIONS = ("version", "checkpoint", "begin_checkpoint", "finish_checkpoint", "restore")


def serve_critic(config: Config) -> None:
    """One rank of the critic, until it is told to stop."""
    from aligner.megatron.value_model import build_critic, build_reward_model
    from aligner.megatron.world import initialize, shutdown

    world = initialize(config.critic.parallel, config.seed, config.cluster.collective_timeout_s)
    loss = functools.partial(value_loss, clip=config.algorithm.value_clip)
    # where a reward model is served too, the two take turns on the device
    sharing = DeviceSharing()
    scoring = None
    if config.critic.with_reward:
        scoring = build_scoring(
            config, lambda path: sharing.add("reward", build_reward_model(config, path, world))
        )
    critic = build_critic(config, world, loss)
    takes_turns = config.critic.with_reward and has_reward_model(config.reward)
    model = sharing.add("critic", critic) if takes_turns else critic
    run_critic(
        config, model, model_limits(config, critic_directory(config), model.vocab_size), scoring
    )
    shutdown()  # the groups' threads would abort an interpreter that ends under them


def run_critic(
    config: Config, model: ValueModel, limits: Limits, scoring: Scoring | None = None
) -> None:
    """Serve a value model as the critic, and scores beside it; every rank of its world calls
    this."""
    ranks = CriticRank(config, model)
    serve_role(
        "critic",
        config,
        handlers={**ranks.handlers, **(scoring.handlers if scoring else {})},
        endpoints=with_rewards(_endpoints, scoring) if scoring else _endpoints,
        operations=_OPERATIONS,
        limits=narrower(limits, scoring.limits) if scoring else limits,
    )


class CriticRank:
    """One rank's side of the critic. All ranks hold the same ledger, so that they accept and refuse
    alike."""

    def __init__(self, config: Config, model: ValueModel) -> None:
        self._config = config
        self._model = model
        self._ledger = UpdateLedger()
        # the checkpoint that is being written, and its ledger
        self._saving: tuple[int, UpdateLedger] | None = None
        self._finished: int | None = None

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What each op does."""
        return {op: getattr(self, op) for op in ("infer", "train", *_OPERATIONS)}

    @rank_handler(join=RowJoin())
    def infer(self, tokens: Tensor, lengths: Tensor, after: int | None = None) -> Tensor:
        """Values float32 [B, S] of tokens int64 [B, S]. Raises SequenceError unless `after` is the
        last update."""
        if after is not None:
            self._ledger.check_follows(after)
        return self._model.values(tokens, lengths)

    def train(
        self,
        tokens: Tensor,
        returns: Tensor,
        old_values: Tensor,
        mask: Tensor,
        run_id: str | None,
        sequence_number: int | None,
    ) -> dict[str, float]:
        """Apply an update once; a repeat of the last one returns its recorded result. Raises
        SequenceError."""
        if sequence_number is None:
            if not self._config.server.accept_unnumbered:
                raise SequenceError(
                    "sequence_number: missing; send it, or set server.accept_unnumbered=true"
                )
            return self._model.train(tokens, returns, old_values, mask)
        run = RunId.parse(run_id or "")
        self._ledger.check_run(run)
        repeated = self._ledger.is_repeat(sequence_number)
        self._ledger.run = run
        if repeated:
            assert self._ledger.result is not None
            return self._ledger.result
        result = self._model.train(tokens, returns, old_values, mask)
        self._ledger.record(sequence_number, result)
        return result

    def version(self) -> dict[str, Any]:
        """Optimizer steps taken, and the last applied update."""
        return {
            "protocol": PROTOCOL_VERSION,
            "version": self._model.version,
            "sequence_number": self._ledger.last,
            "run_id": None if self._ledger.run is None else str(self._ledger.run),
        }

    def begin_checkpoint(
        self, step: int, sequence_number: int | None = None, run_id: str | None = None
    ) -> dict[str, Any]:
        """Begin to save as the critic's part of the run's checkpoint `step`; requests go on being
        served.

        Raises SequenceError unless `sequence_number` is the last update, and for another trainer
        than the run's newest.
        """
        self._write_for(run_id)
        if sequence_number is not None:
            self._ledger.check_follows(sequence_number)
        self.finish_checkpoint()
        directory = self._directory(step)
        directory.parent.mkdir(parents=True, exist_ok=True)
        self._model.begin_save(directory)
        self._saving = step, replace(self._ledger)
        return {"step": step, **self.version()}

    def finish_checkpoint(self) -> dict[str, Any]:
        """Wait until the checkpoint that was begun, if any, is complete; `finished` is the step of
        the last begun so."""
        saving, self._saving = self._saving, None
        self._model.finish_save()
        if saving is not None:
            self._finished, ledger = saving
            # After the weights: a checkpoint with a ledger is complete.
            if not dist.is_initialized() or dist.get_rank() == 0:
                with writing():
                    ledger.save(self._directory(self._finished) / _LEDGER)
        return {"finished": self._finished, **self.version()}

    def checkpoint(
        self, step: int | None, sequence_number: int | None = None, run_id: str | None = None
    ) -> dict[str, Any]:
        """Save as `begin_checkpoint`, the optimizer steps taken when `step` is None, and wait until
        it is complete.

        One that the trainer has begun is complete then, and is still the one that it finds
        finished.
        """
        begun = self.begin_checkpoint(
            self._model.version if step is None else step, sequence_number, run_id
        )
        finished = self._finished
        self.finish_checkpoint()
        self._finished = finished
        return begun

    def restore(
        self, step: int, sequence_number: int | None = None, run_id: str | None = None
    ) -> dict[str, Any]:
        """Go back to the run's checkpoint `step`, for the trainer `run_id`.

        Raises AlignerError when the checkpoint is missing or incomplete, SequenceError when it is
        another run's, and InstanceError when the last update is not `sequence_number`: a request
        that comes late must not undo what was done since.
        """
        if sequence_number not in (None, self._ledger.last):
            raise InstanceError(
                f"restore: the request expects last update {sequence_number}, but the critic's"
                f" last update is {self._ledger.last}"
            )
        self._write_for(run_id)
        self.finish_checkpoint()
        directory = self._directory(step)
        if not directory.is_dir():
            raise AlignerError(f"restore: the critic checkpoint {directory} does not exist")
        ledger = UpdateLedger.load(directory / _LEDGER)
        if run_id is not None:
            run = RunId.parse(run_id)
            ledger.check_run(run)
            ledger.run = run
        self._model.load(directory)
        self._ledger = ledger
        return {"step": step, **self.version()}

    def _write_for(self, run_id: str | None) -> None:
        """Write for this trainer while the run is its own. Raises SequenceError unless it is the
        newest that was heard."""
        if run_id is not None:
            self._ledger.check_run(RunId.parse(run_id))
            if run_paths(self._config).claim.exists():  # none but a trainer of ours takes a run
                write_as(self._config, {"attempt": RunId.parse(run_id).attempt})

    def _directory(self, step: int) -> Path:
        return run_paths(self._config).checkpoint(step, "critic")


def _number(arrays: Mapping[str, NDArray]) -> int | None:
    return int(arrays["sequence_number"].flat[0]) if "sequence_number" in arrays else None


def _endpoints(call: Caller) -> Mapping[EndpointSpec, Serve]:
    def infer(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
        tensors = {
            "tokens": tensor(arrays["tokens"]),
            "lengths": tensor(arrays["sequence_lengths"][:, 0]),
        }
        after = _number(arrays)
        values = call("infer", tensors, alone=after is not None, after=after)
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
            sequence_number=_number(arrays),
        )
        # it is absent where it was not finite, and the update was skipped
        loss = stats.get("loss", float("nan"))
        return {
            "loss_mean": np.array([loss], dtype=np.float32),
            "stats": text_array(json.dumps(stats)),
        }

    def save(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
        call("checkpoint", step=None)
        return {"status": np.zeros(1, dtype=np.int64)}

    return {CRITIC_INFER: infer, CRITIC_TRAIN: train, CRITIC_SAVE: save}


def with_rewards(critic: Endpoints, scoring: Scoring) -> Endpoints:
    """The critic's endpoints with `rewards` beside the values, and `reward_model` beside them."""

    def endpoints(call: Caller) -> Mapping[EndpointSpec, Serve]:
        served, rewards = dict(critic(call)), scoring.endpoints(call)
        infer, score = served.pop(CRITIC_INFER), rewards[REWARD_MODEL]

        def infer_with_reward(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
            asked = {spec.name for spec in REWARD_MODEL.inputs}
            # First, because metadata is read there: what is refused costs the ranks nothing.
            scores = score({name: array for name, array in arrays.items() if name in asked})
            return infer(arrays) | scores

        return {CRITIC_INFER_WITH_REWARD: infer_with_reward, **served, **rewards}

    return endpoints
