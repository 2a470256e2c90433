"""Simulation of the training pipeline.

It predicts step times of measured phases on other numbers of devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

HOST = "host"
"""Role of a phase that uses no device, such as a reward function on the CPU."""

DEVICE_ROLES = ("trainer", "generator", "critic", "reward", "teacher")
"""Roles that share the devices, in the order of their display."""

Placement = Mapping[str, int]
"""Number of devices of each role."""

# Simulated batches before the measurement, and minimum number of averaged batches.
_MIN_WARMUP_BATCHES = 8
_MIN_AVERAGED_BATCHES = 16
# Maximum number of units that a split moves between two roles.
_LARGEST_MOVE_UNITS = 2


@dataclass(frozen=True)
class Phase:
    """One measured phase of a step, such as `generate` or `train`."""

    name: str
    role: str
    seconds: tuple[float, ...]
    """Duration in each measured step, in seconds."""
    devices: int
    """Number of devices of the role during the measurement."""

    @property
    def mean_seconds(self) -> float:
        """Mean duration over the measured steps, in seconds."""
        return sum(self.seconds) / len(self.seconds)

    def seconds_on(self, devices: int) -> tuple[float, ...]:
        """Return the predicted durations on another number of devices.

        They are inversely proportional to the number of devices, except for phases without devices.
        """
        if self.role == HOST:
            return self.seconds
        return tuple(duration * self.devices / devices for duration in self.seconds)


@dataclass(frozen=True)
class PipelineModel:
    """The phases of a step, and how far generation may run ahead of training."""

    phases: tuple[Phase, ...]
    """Phases with distinct names, all measured over the same steps."""
    micro_batches: int
    """Number of parts of a batch; a part is scored as soon as it is generated."""
    max_staleness: int
    """Maximum staleness of a batch in weight versions; 0 means synchronous."""

    @property
    def is_colocated(self) -> bool:
        """Whether the engine generates on the trainer's devices."""
        return any(phase.name == "generate" and phase.role == "trainer" for phase in self.phases)


class _Simulation:
    """Simulation of the pipeline, batch by batch.

    A role runs one phase at a time, and a phase starts as soon as its role is free and its inputs
    exist. All times are seconds since the start of the run.
    """

    def __init__(self, pipeline: PipelineModel, placement: Placement) -> None:
        self._pipeline = pipeline
        self._phases = {phase.name: phase for phase in pipeline.phases}
        self._seconds = {
            phase.name: phase.seconds_on(placement.get(phase.role, 1)) for phase in pipeline.phases
        }
        self._free_at = {"trainer": 0.0} | {phase.role: 0.0 for phase in pipeline.phases}
        self.published_at = [0.0]
        """Time at which each weight version was published; the initial weights at time 0."""

    def run_batch(self) -> None:
        """Generate, score and train on one more batch, and publish the new weights."""
        batch = len(self.published_at) - 1
        parts = range(self._pipeline.micro_batches)

        generated_at = self._generate(batch)
        batch_complete_at = max(generated_at)

        # A synchronous run requests the values of each part as soon as it is generated. Otherwise
        # the trainer requests them when it takes the batch, so that they are the newest critic's.
        trainer_takes_at = max(batch_complete_at, self._free_at["trainer"])
        is_synchronous = self._pipeline.max_staleness == 0

        experience_at = 0.0
        for part in parts:
            values_start = generated_at[part] if is_synchronous else trainer_takes_at
            starts = {
                "score": generated_at[part],
                "values": values_start,
                "teacher_logprobs": generated_at[part],
                "logprobs": batch_complete_at,
            }
            for name, start in starts.items():
                end = self._run(name, batch, start, share=1 / len(parts))
                experience_at = max(experience_at, end)

        policy_at = self._run("train", batch, experience_at)
        critic_at = self._run("critic_train", batch, experience_at)

        # A step of the trainer ends after the critic's update too.
        recorded_at = self._run("other", batch, max(policy_at, critic_at))
        self.published_at.append(self._run("publish", batch, recorded_at))

    def _generate(self, batch: int) -> list[float]:
        """Return the time at which each part of a batch is generated."""
        # The staleness bound: the batch waits for the oldest weights that it may be generated with.
        oldest_version = max(0, batch - self._pipeline.max_staleness)
        start = self.published_at[oldest_version]

        # The engine already has the initial weights.
        if oldest_version > 0:
            start = self._run("load", batch, start)

        parts = self._pipeline.micro_batches
        return [self._run("generate", batch, start, share=1 / parts) for _ in range(parts)]

    def _run(self, name: str, batch: int, start: float, share: float = 1.0) -> float:
        """Run a share of a phase when its role is free, and return the time at which it ends.

        A phase that the pipeline does not have takes no time.
        """
        if name not in self._phases:
            return start
        role = self._phases[name].role
        durations = self._seconds[name]

        start = max(start, self._free_at[role])
        end = start + share * durations[batch % len(durations)]
        self._free_at[role] = end
        return end


def predict_step_seconds(pipeline: PipelineModel, placement: Placement) -> float:
    """Return the mean seconds of a step once the pipeline has reached its steady state."""
    simulation = _Simulation(pipeline, placement)

    # With max_staleness=K, K + 1 batches are in flight, and their starts repeat in that period.
    period = pipeline.max_staleness + 1
    for _ in range(_MIN_WARMUP_BATCHES + 2 * period):
        simulation.run_batch()
    warmup_end = simulation.published_at[-1]

    # Average over whole rounds of the measured steps, because their durations differ.
    measured_steps = max(len(phase.seconds) for phase in pipeline.phases)
    required_batches = max(_MIN_AVERAGED_BATCHES, 8 * period)
    rounds = -(-required_batches // measured_steps)
    batches = rounds * measured_steps
    for _ in range(batches):
        simulation.run_batch()
    return (simulation.published_at[-1] - warmup_end) / batches


def candidate_splits(
    placement: Placement, units: Placement, limiting_role: str
) -> Iterator[dict[str, int]]:
    """Yield splits that are close enough to the measured one for a prediction.

    A split moves one or two units from one role to another, or adds one unit to the limiting role.
    Each role's devices change by at most a factor of two.

    Args:
        placement: Devices of each role in the measured run.
        units: Smallest number of devices that a role can gain or lose: one replica of its model.
        limiting_role: The role whose phases take the largest share of a step.
    """
    candidates = []
    for donor, recipient in itertools.permutations(placement, 2):
        for moved_units in range(1, _LARGEST_MOVE_UNITS + 1):
            # The larger of the two units is the smallest number of devices that both can exchange.
            devices = moved_units * max(units[donor], units[recipient])
            lost = -(-devices // units[donor]) * units[donor]
            gained = devices // units[recipient] * units[recipient]
            candidates.append(
                {
                    **placement,
                    donor: placement[donor] - lost,
                    recipient: placement[recipient] + gained,
                }
            )
    if limiting_role in placement:
        larger = placement[limiting_role] + units[limiting_role]
        candidates.append({**placement, limiting_role: larger})

    for candidate in candidates:
        ratios = [candidate[role] / placement[role] for role in placement]
        if min(ratios) >= 0.5 and max(ratios) <= 2:
            yield candidate


@dataclass(frozen=True)
class Prediction:
    """Predicted step time of a changed run."""

    placement: Placement
    step_s: float
    """Predicted seconds of a step."""
    change: float
    """Relative change of the step time; -0.2 is 20% less than measured."""


class StepPredictor:
    """Predict step times relative to a measured step.

    The model's own error for the measured run cancels: the measured step time is scaled by the
    ratio of two simulated step times.
    """

    def __init__(
        self, pipeline: PipelineModel, placement: Placement, measured_step_s: float
    ) -> None:
        """Simulate the measured run.

        Args:
            pipeline: Measured phases.
            placement: Devices of each role in the measured run.
            measured_step_s: Mean seconds of a measured step.
        """
        self._pipeline = pipeline
        self._placement = placement
        self._measured_step_s = measured_step_s
        self._simulated_step_s = predict_step_seconds(pipeline, placement)

    @property
    def model_error(self) -> float:
        """Relative error of the simulated step time of the measured run itself."""
        return self._simulated_step_s / self._measured_step_s - 1

    def predict_split(self, placement: Placement) -> Prediction:
        """Predict the step time of the same pipeline on another device split."""
        return self._predict(self._pipeline, placement)

    def predict_asynchronous(self) -> Prediction:
        """Predict the step time of a synchronous run with `rollout.max_staleness=1`."""
        return self._predict(replace(self._pipeline, max_staleness=1), self._placement)

    def _predict(self, pipeline: PipelineModel, placement: Placement) -> Prediction:
        ratio = predict_step_seconds(pipeline, placement) / self._simulated_step_s
        return Prediction(placement, step_s=self._measured_step_s * ratio, change=ratio - 1)
