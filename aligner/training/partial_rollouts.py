"""Partial rollouts: prompts whose samples stay in flight from one batch to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from aligner.data.collectives import samples_from_tensors, samples_to_tensors
from aligner.data.types import Prompt, Sample


@dataclass(frozen=True)
class Straggler:
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
        sequences = [sample.sequences[0] for sample in self.samples]
        generated_versions = [
            sequence.weight_versions
            if sequence.drawn is None
            else sequence.weight_versions[sequence.drawn]
            for sequence in sequences
        ]
        return [int(versions[0]) for versions in generated_versions if len(versions)]


def divided(
    stragglers: Sequence[Straggler], count: int, max_deferrals: int
) -> tuple[list[Straggler], tuple[Straggler, ...]]:
    """Return `count` complete prompts, and all the others.

    Complete prompts that may not be carried over again are taken first, then those admitted first.

    Args:
        stragglers: Prompts in the order of their admission; both results keep this order.
        count: Number of prompts to take.
        max_deferrals: Maximum number of times that a prompt may be carried over.
    """
    complete_indices = [
        index for index, straggler in enumerate(stragglers) if straggler.is_complete
    ]
    # The sort is stable: prompts with equal keys stay in the order of their admission.
    complete_indices.sort(key=lambda index: stragglers[index].deferrals < max_deferrals)
    chosen = set(complete_indices[:count])
    selected = [straggler for index, straggler in enumerate(stragglers) if index in chosen]
    return selected, tuple(
        straggler for index, straggler in enumerate(stragglers) if index not in chosen
    )


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the fields of a prompt as JSON values, without its tokens, which its samples
    contain."""
    return {"id": prompt.id, "text": prompt.text, "metadata": dict(prompt.metadata)}


def to_saved(stragglers: Sequence[Straggler]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return tensors and JSON records from which `from_saved` restores the stragglers."""
    samples = [sample for straggler in stragglers for sample in straggler.samples]
    records = []
    for straggler in stragglers:
        fields = prompt_fields(straggler.prompt)
        records.append(
            {"prompt": fields, "samples": len(straggler.samples), "deferrals": straggler.deferrals}
        )
    return samples_to_tensors(samples), records


def from_saved(
    tensors: Mapping[str, Tensor], records: Sequence[Mapping[str, Any]]
) -> tuple[Straggler, ...]:
    """Restore the stragglers from the tensors and records of `to_saved`."""
    samples = samples_from_tensors(tensors)
    stragglers = []
    first = 0
    for fields in records:
        prompt_samples = samples[first : first + fields["samples"]]
        first += len(prompt_samples)
        prompt = Prompt(**fields["prompt"], tokens=prompt_samples[0].initial_prompt)
        prompt_samples = [replace(sample, metadata=prompt.metadata) for sample in prompt_samples]
        stragglers.append(Straggler(prompt, tuple(prompt_samples), fields["deferrals"]))
    return tuple(stragglers)
