"""Partial rollouts: prompts whose samples stay in flight from one batch to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from aligner.data.collectives import samples_from_tensors, samples_to_tensors
from aligner.data.types import Prompt, Sample


@dataclass(frozen=True)
class PartialRollout:
    """A prompt in flight, with its samples."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    """All samples of the prompt; each may be complete, partial or not started."""
    deferrals: int = 0
    """Number of batches that this prompt was carried over."""

    @property
    def is_complete(self) -> bool:
        """Whether all samples of the prompt are complete."""
        return all(sample.finish_reason != "unfinished" for sample in self.samples)

    @property
    def first_versions(self) -> list[int]:
        """Weight version of the first generated token, for each sample that has one."""
        first_versions = []
        for sample in self.samples:
            sequence = sample.sequences[0]
            versions = sequence.weight_versions
            # No weights generated the observation tokens; their entries are 0.
            if sequence.generated_mask is not None:
                versions = versions[sequence.generated_mask]
            if len(versions):
                first_versions.append(int(versions[0]))
        return first_versions


def split_complete(
    partial_rollouts: Sequence[PartialRollout], count: int, max_deferrals: int
) -> tuple[list[PartialRollout], tuple[PartialRollout, ...]]:
    """Return `count` complete prompts, and all the others.

    Complete prompts that may not be carried over again are taken first, then those admitted first.

    Args:
        partial_rollouts: Prompts in the order of their admission; both results keep this order.
        count: Number of prompts to take.
        max_deferrals: Maximum number of times that a prompt may be carried over.
    """
    complete_indices = [
        index for index, rollout in enumerate(partial_rollouts) if rollout.is_complete
    ]
    # The sort is stable: prompts with equal keys stay in the order of their admission.
    complete_indices.sort(key=lambda index: partial_rollouts[index].deferrals < max_deferrals)
    # A set, because both results keep the order of admission and not the order of the sort.
    selected_indices = set(complete_indices[:count])
    selected = []
    others = []
    for index, rollout in enumerate(partial_rollouts):
        if index in selected_indices:
            selected.append(rollout)
        else:
            others.append(rollout)
    return selected, tuple(others)


def prompt_to_json(prompt: Prompt) -> dict[str, Any]:
    """Return the fields of a prompt as JSON values, without its tokens, which its samples
    contain."""
    return {"id": prompt.id, "text": prompt.text, "metadata": dict(prompt.metadata)}


def serialize_partial_rollouts(
    partial_rollouts: Sequence[PartialRollout],
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the tensors and JSON records of partial rollouts.

    `deserialize_partial_rollouts` restores them.
    """
    samples = [sample for rollout in partial_rollouts for sample in rollout.samples]
    # The tensors contain the samples of all prompts; the counts in the records separate them.
    records = [
        {
            "prompt": prompt_to_json(rollout.prompt),
            "samples": len(rollout.samples),
            "deferrals": rollout.deferrals,
        }
        for rollout in partial_rollouts
    ]
    return samples_to_tensors(samples), records


def deserialize_partial_rollouts(
    tensors: Mapping[str, Tensor], records: Sequence[Mapping[str, Any]]
) -> tuple[PartialRollout, ...]:
    """Restore partial rollouts from the results of `serialize_partial_rollouts`."""
    samples = samples_from_tensors(tensors)
    partial_rollouts = []
    first = 0
    for fields in records:
        prompt_samples = samples[first : first + fields["samples"]]
        first += len(prompt_samples)
        # The records have no tokens, and the tensors no metadata: each restores the other's part.
        prompt = Prompt(**fields["prompt"], tokens=prompt_samples[0].initial_prompt)
        prompt_samples = [replace(sample, metadata=prompt.metadata) for sample in prompt_samples]
        partial_rollouts.append(PartialRollout(prompt, tuple(prompt_samples), fields["deferrals"]))
    return tuple(partial_rollouts)
