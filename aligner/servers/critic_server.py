"""The critic role: it serves values and updates of the value model, and optionally the reward."""

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
from aligner.data.fencing import fenced_write, set_writer_claim
from aligner.errors import AlignerError
from aligner.models.model_source import critic_directory
from aligner.paths import get_run_paths
from aligner.schema import Config
from aligner.schema.reward_sources import has_reward_model
from aligner.servers.critic_client import RunId, SequenceError, UpdateLedger
from aligner.servers.rank_commands import Handler, RowBatcher, rank_handler
from aligner.servers.reward_server import RewardRank, build_reward_rank, intersect_limits
from aligner.servers.serving import (
    Caller,
    EndpointFactory,
    compute_model_limits,
    copy_to_tensor,
    serve_role,
)
from aligner.servers.triton_host import EndpointFunction
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
    decode_text,
    encode_text,
)

_LEDGER_FILE = "updates.json"
_OPERATIONS = ("version", "checkpoint", "begin_checkpoint", "finish_checkpoint", "restore")


def serve_critic(config: Config) -> None:
    """Run one rank of the critic until it is stopped."""
    from aligner.megatron.value_model import build_critic, build_reward_model
    from aligner.megatron.world import initialize, shutdown

    world = initialize(config.critic.parallel, config.seed, config.cluster.collective_timeout_s)
    loss = functools.partial(value_loss, clip=config.algorithm.value_clip)
    # If a reward model is served, too, the two models use the device alternately.
    sharing = DeviceSharing()
    reward = None
    if config.critic.with_reward:
        reward = build_reward_rank(
            config, lambda path: sharing.add("reward", build_reward_model(config, path, world))
        )
    critic = build_critic(config, world, loss)
    shares_device = config.critic.with_reward and has_reward_model(config.reward)
    model = sharing.add("critic", critic) if shares_device else critic
    run_critic(
        config,
        model,
        compute_model_limits(config, critic_directory(config), model.vocab_size),
        reward,
    )
    shutdown()  # otherwise the threads of the process groups can abort the exiting interpreter


def run_critic(
    config: Config, model: ValueModel, limits: Limits, reward: RewardRank | None = None
) -> None:
    """Serve a value model as the critic, and optionally rewards. Collective.

    Args:
        config: The run's configuration.
        model: The value model.
        limits: Limits of requests to the value model.
        reward: The reward that is served in addition.
    """
    critic = CriticRank(config, model)
    serve_role(
        "critic",
        config,
        handlers={**critic.handlers, **(reward.handlers if reward else {})},
        create_endpoints=with_reward_endpoints(_create_endpoints, reward)
        if reward
        else _create_endpoints,
        operations=_OPERATIONS,
        limits=intersect_limits(limits, reward.limits) if reward else limits,
    )


class CriticRank:
    """One rank's part of the critic.

    All ranks have equal ledgers, so that they accept or refuse a request together.
    """

    def __init__(self, config: Config, model: ValueModel) -> None:
        self._config = config
        self._model = model
        self._ledger = UpdateLedger()
        # Step and ledger of the checkpoint that is being written.
        self._pending_checkpoint: tuple[int, UpdateLedger] | None = None
        # Step of the last checkpoint that was completed after `begin_checkpoint`.
        self._finished: int | None = None

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The function that each rank executes for an operation, by the name of the operation."""
        return {op: getattr(self, op) for op in ("infer", "train", *_OPERATIONS)}

    @rank_handler(batcher=RowBatcher())
    def infer(self, tokens: Tensor, lengths: Tensor, after_update: int | None = None) -> Tensor:
        """Return values, float32 [B, S].

        Args:
            tokens: int64 [B, S].
            lengths: int64 [B].
            after_update: Number that the last update must have; None accepts any update.

        Raises:
            SequenceError: The last update has another number.
        """
        if after_update is not None:
            self._ledger.check_follows(after_update)
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
        """Apply an update exactly once, and return its statistics.

        A repetition of the last update returns the recorded result.

        Args:
            tokens: int64 [B, S].
            returns: float32 [B, S-1].
            old_values: float32 [B, S-1].
            mask: bool [B, S-1].
            run_id: The trainer that sends the update.
            sequence_number: Number of the update; None only with `server.accept_unnumbered`.

        Raises:
            SequenceError: The update is not the next one, or belongs to another run or an old
                trainer.
        """
        if sequence_number is None:
            if not self._config.server.accept_unnumbered:
                raise SequenceError(
                    "sequence_number: missing; send it, or set server.accept_unnumbered=true"
                )
            return self._model.train(tokens, returns, old_values, mask)

        run = RunId.parse(run_id or "")
        self._ledger.check_run(run)
        is_repeat = self._ledger.is_repeat(sequence_number)
        self._ledger.run = run
        if is_repeat:
            assert self._ledger.result is not None
            return self._ledger.result

        result = self._model.train(tokens, returns, old_values, mask)
        self._ledger.record(sequence_number, result)
        return result

    def version(self) -> dict[str, Any]:
        """Return the protocol version, the number of optimizer steps, and the last update."""
        return {
            "protocol": PROTOCOL_VERSION,
            "version": self._model.version,
            "sequence_number": self._ledger.last,
            "run_id": None if self._ledger.run is None else str(self._ledger.run),
        }

    def begin_checkpoint(
        self, step: int, sequence_number: int | None = None, run_id: str | None = None
    ) -> dict[str, Any]:
        """Begin to save the critic's part of the run's checkpoint `step`, in the background.

        The critic serves requests during the save.

        Raises:
            SequenceError: `sequence_number` is not the last update, or `run_id` is not the run's
                newest trainer.
        """
        self._authorize_writes(run_id)
        if sequence_number is not None:
            self._ledger.check_follows(sequence_number)

        self.finish_checkpoint()
        directory = self._get_checkpoint_directory(step)
        directory.parent.mkdir(parents=True, exist_ok=True)
        self._model.begin_save(directory)
        self._pending_checkpoint = step, replace(self._ledger)
        return {"step": step, **self.version()}

    def finish_checkpoint(self) -> dict[str, Any]:
        """Wait until the checkpoint of the last `begin_checkpoint` is complete.

        Returns:
            The fields of `version`, and `finished`: the step of the last completed checkpoint.
        """
        pending = self._pending_checkpoint
        self._pending_checkpoint = None
        self._model.finish_save()
        if pending is not None:
            self._finished, ledger = pending
            # The ledger is written after the weights: a checkpoint that has a ledger is complete.
            if not dist.is_initialized() or dist.get_rank() == 0:
                with fenced_write():
                    ledger.save(self._get_checkpoint_directory(self._finished) / _LEDGER_FILE)
        return {"finished": self._finished, **self.version()}

    def checkpoint(
        self, step: int | None, sequence_number: int | None = None, run_id: str | None = None
    ) -> dict[str, Any]:
        """Save a checkpoint as `begin_checkpoint` does, and wait until it is complete.

        A checkpoint that the trainer began earlier is then complete, too. `finish_checkpoint` still
        reports the step of that earlier checkpoint.

        Args:
            step: Step of the checkpoint; None means the number of optimizer steps.
            sequence_number: Number that the last update must have; None accepts any update.
            run_id: The trainer that sends the request.
        """
        answer = self.begin_checkpoint(
            self._model.version if step is None else step, sequence_number, run_id
        )
        finished = self._finished
        self.finish_checkpoint()
        self._finished = finished
        return answer

    def restore(
        self, step: int, sequence_number: int | None = None, run_id: str | None = None
    ) -> dict[str, Any]:
        """Restore the run's checkpoint `step`, for the trainer `run_id`.

        Args:
            step: Step of the checkpoint.
            sequence_number: Number that the last update must have at the time of the request. A
                request that arrives late therefore cannot undo later updates.
            run_id: The trainer that sends the request.

        Raises:
            AlignerError: The checkpoint is missing or incomplete.
            SequenceError: The checkpoint belongs to another run, or a newer trainer took over the
                run.
            InstanceError: The last update has another number.
        """
        if sequence_number not in (None, self._ledger.last):
            raise InstanceError(
                f"restore: the request expects last update {sequence_number}, but the critic's"
                f" last update is {self._ledger.last}"
            )
        self._authorize_writes(run_id)

        self.finish_checkpoint()
        directory = self._get_checkpoint_directory(step)
        if not directory.is_dir():
            raise AlignerError(f"restore: the critic checkpoint {directory} does not exist")
        ledger = UpdateLedger.load(directory / _LEDGER_FILE)
        if run_id is not None:
            run = RunId.parse(run_id)
            ledger.check_run(run)
            ledger.run = run

        self._model.load(directory)
        self._ledger = ledger
        return {"step": step, **self.version()}

    def _authorize_writes(self, run_id: str | None) -> None:
        """Write as the given trainer, as long as it owns the run (fencing).

        Raises:
            SequenceError: A newer trainer has sent a request, or the trainer belongs to another
                run.
        """
        if run_id is not None:
            self._ledger.check_run(RunId.parse(run_id))
            # Only aligner's trainers create the file `claim`; third-party clients do not.
            if get_run_paths(self._config).claim.exists():
                set_writer_claim(self._config, {"attempt": RunId.parse(run_id).attempt})

    def _get_checkpoint_directory(self, step: int) -> Path:
        return get_run_paths(self._config).checkpoint(step, "critic")


def _read_sequence_number(arrays: Mapping[str, NDArray]) -> int | None:
    """Return the sequence number of a request, or None if it has none."""
    return int(arrays["sequence_number"].flat[0]) if "sequence_number" in arrays else None


def _create_endpoints(call: Caller) -> Mapping[EndpointSpec, EndpointFunction]:
    """Return rank 0's function of each endpoint."""

    def infer(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
        """Return the values of each row."""
        tensors = {
            "tokens": copy_to_tensor(arrays["tokens"]),
            "lengths": copy_to_tensor(arrays["sequence_lengths"][:, 0]),
        }
        after_update = _read_sequence_number(arrays)
        # The run's own requests have a number. They are not batched with those of other clients,
        # because the rows of a batch change the rounding.
        values = call(
            "infer", tensors, is_unbatched=after_update is not None, after_update=after_update
        )
        return {"values": values.float().cpu().numpy()}

    def train(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
        """Apply one update. Return NeMo-Aligner's `loss_mean`, and all statistics as JSON."""
        stats = call(
            "train",
            {
                "tokens": copy_to_tensor(arrays["tokens"]),
                "returns": copy_to_tensor(arrays["returns"]),
                "old_values": copy_to_tensor(arrays["prev_values"]),
                "mask": copy_to_tensor(arrays["mask"]).bool(),
            },
            run_id=decode_text(arrays["run_id"]) if "run_id" in arrays else None,
            sequence_number=_read_sequence_number(arrays),
        )
        # The loss is absent if it was not finite, in which case the update was skipped.
        loss = stats.get("loss", float("nan"))
        return {
            "loss_mean": np.array([loss], dtype=np.float32),
            "stats": encode_text(json.dumps(stats)),
        }

    def save(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
        """Save a checkpoint whose step is the number of optimizer steps."""
        call("checkpoint", step=None)
        return {"status": np.zeros(1, dtype=np.int64)}

    return {CRITIC_INFER: infer, CRITIC_TRAIN: train, CRITIC_SAVE: save}


def with_reward_endpoints(critic: EndpointFactory, reward: RewardRank) -> EndpointFactory:
    """Return a factory of the critic's endpoints with rewards in addition to values.

    The factory also creates the endpoint `reward_model`.

    Args:
        critic: Creates the endpoints of the critic alone.
        reward: The reward.
    """

    def create_endpoints(call: Caller) -> Mapping[EndpointSpec, EndpointFunction]:
        """Return the endpoints of both servers, and one for values and rewards together."""
        critic_endpoints = dict(critic(call))
        reward_endpoints = reward.create_endpoints(call)
        infer = critic_endpoints.pop(CRITIC_INFER)
        score = reward_endpoints[REWARD_MODEL]

        def infer_with_reward(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
            reward_inputs = {spec.name for spec in REWARD_MODEL.inputs}
            # Scores are computed first, because invalid metadata is refused there before the ranks
            # have any work.
            scores = score({name: array for name, array in arrays.items() if name in reward_inputs})
            return infer(arrays) | scores

        return {CRITIC_INFER_WITH_REWARD: infer_with_reward, **critic_endpoints, **reward_endpoints}

    return create_endpoints
