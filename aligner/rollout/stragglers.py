"""Prompts whose samples are under way from one batch to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from aligner.data.collectives import samples_from_tensors, samples_to_tensors
from aligner.data.types import Prompt, Sample


@dataclass(frozen=True)
class Straggler:
    """A prompt that is under way."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    """All of them, some perhaps complete, some perhaps not begun."""
    deferrals: int = 0
    """Batches that have gone without it."""

    @property
    def is_complete(self) -> bool:
        """Whether all its samples are."""
        return all(sample.finish_reason != "unfinished" for sample in self.samples)

    @property
    def first_versions(self) -> list[int]:
        """Of the weights that drew the first token of each sample that has one."""
        firsts = [one.sequences[0] for one in self.samples]
        drawn = [
            one.weight_versions if one.drawn is None else one.weight_versions[one.drawn]
            for one in firsts
        ]
        return [int(versions[0]) for versions in drawn if len(versions)]


def divided(
    stragglers: Sequence[Straggler], count: int, max_deferrals: int
) -> tuple[list[Straggler], tuple[Straggler, ...]]:
    """`count` complete ones, and the others; those that may not be left behind again come first,
    then the longest admitted.

    stragglers: in the order of their admission, which both parts keep.
    """
    complete = [place for place, straggler in enumerate(stragglers) if straggler.is_complete]
    complete.sort(key=lambda place: stragglers[place].deferrals < max_deferrals)
    chosen = set(complete[:count])
    taken = [straggler for place, straggler in enumerate(stragglers) if place in chosen]
    return taken, tuple(
        straggler for place, straggler in enumerate(stragglers) if place not in chosen
    )


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """What a prompt is made of beside its tokens, which its samples begin with; JSON."""
    return {"id": prompt.id, "text": prompt.text, "metadata": dict(prompt.metadata)}


def to_saved(stragglers: Sequence[Straggler]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Tensors and JSON that `from_saved` makes the same stragglers of."""
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
    """The stragglers as they were."""
    samples = samples_from_tensors(tensors)
    stragglers, first = [], 0
    for fields in records:
        own = samples[first : first + fields["samples"]]
        first += len(own)
        prompt = Prompt(**fields["prompt"], tokens=own[0].initial_prompt)
        own = [replace(sample, metadata=prompt.metadata) for sample in own]
        stragglers.append(Straggler(prompt, tuple(own), fields["deferrals"]))
    return tuple(stragglers)
