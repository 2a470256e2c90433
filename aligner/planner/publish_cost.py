"""What a publish of the policy's weights costs: bytes, rounds and votes, known from the two layouts
and the bucket alone."""

from dataclasses import dataclass, replace

from aligner.engines.engine_protocol import weight_format
from aligner.errors import AlignerError, ConfigError
from aligner.models.model_source import absent_inputs, read_shape
from aligner.placement.roles import has_generator, uses_gpus
from aligner.resharding.remote_publisher import plan_between_worlds
from aligner.resharding.transfer_plan import TransferPlan, plan_to_engine
from aligner.resharding.transport import steps
from aligner.schema import Config


@dataclass(frozen=True)
class PublishCost:
    """What one publish takes; the bytes are those that go from rank to rank."""

    bytes: int
    sent: int
    """The most that one rank sends"""
    received: int
    """The most that one rank receives"""
    rounds: int
    """Batches, each with a latency of its own, that the rank with most bytes to move exchanges one
    after another"""
    votes: int
    """Times that all ranks wait for each other to agree"""
    seconds: float | None = None
    """None where no rate is known"""

    @property
    def most(self) -> int:
        """The most that one rank moves one way; it sends and receives at once."""
        return max(self.sent, self.received)

    def at(self, bytes_per_s: float) -> "PublishCost":
        """Where a rank moves so many bytes a second each way; what rounds and votes take beside
        that is not known."""
        return replace(self, seconds=self.most / bytes_per_s)


def publish_cost(plan: TransferPlan, group_bytes: int | None, bucket_bytes: int) -> PublishCost:
    """Of a plan to an engine that takes its tensors `group_bytes` at a time, or all at once where
    that is None.

    Raises AlignerError where a row of a tensor does not fit into a batch.
    """
    groups = plan.groups(group_bytes)
    sent, received = _moved(plan)
    rounds = 0
    for group in groups:
        # The others' rounds are in step with those of the ranks that have most to move.
        busiest = {max(moved, key=moved.__getitem__) for moved in _moved(group)}
        rounds += max(len(steps(group, rank, bucket_bytes)) for rank in busiest)
    # Of each group it is agreed that it is begun, and that it has arrived, and, of several, loaded;
    # at last all of them serve.
    votes = len(groups) * (2 if group_bytes is None else 3) + 1
    return PublishCost(
        sum(sent.values()), max(sent.values()), max(received.values()), rounds, votes
    )


def _moved(plan: TransferPlan) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes by rank that it sends to others, and that it receives from others."""
    sent, received = (dict.fromkeys(range(len(plan.labels)), 0) for _ in range(2))
    for transfer in plan.transfers:
        if transfer.source != transfer.target:
            sent[transfer.source] += transfer.numel * plan.itemsize
            received[transfer.target] += transfer.numel * plan.itemsize
    return sent, received


def cost_of(config: Config) -> PublishCost:
    """Of a run. Raises ConfigError where it has no engine, its model is not there or its weights do
    not fit the layouts."""
    if not config.algorithm.generates:
        raise ConfigError(
            f"algorithm.trainer={config.algorithm.trainer}: it has no engine to publish to;"
            " allowed: online"
        )
    to = weight_format(config.engine, "cuda" if uses_gpus(config) else "cpu")
    shape, trainer = read_shape(config, absent_inputs(config)), config.actor.parallel
    try:
        plan = (
            plan_between_worlds(shape, trainer, to)
            if has_generator(config)
            else plan_to_engine(shape, trainer, to)
        )
        return publish_cost(plan, to.group_bytes, config.engine.bucket_mib << 20)
    except AlignerError as error:
        raise ConfigError(str(error)) from error
