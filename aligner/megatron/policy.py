"""The policy being trained, the frozen reference beside it, and log-probs under a model that is
stored."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.data.export import Source
from aligner.data.types import KeptTokens, PolicyLoss, Rows, Stats, TaughtTokens
from aligner.megatron import world as worlds
from aligner.megatron.layers import VocabularyHead
from aligner.megatron.lora import LoraWeights
from aligner.megatron.model_checkpoint import CheckpointedModel
from aligner.megatron.packing import PackedBatch
from aligner.megatron.runner import ModelRunner
from aligner.megatron.world import World
from aligner.models.hugging_face import read_config
from aligner.models.shape import ModelShape
from aligner.schema import ActorConfig, MegatronModelConfig

_CHUNK_TOKENS = 1024
"""Logits of a stored model exist for so many tokens at a time."""


class Policy(CheckpointedModel):
    """The actor: log-probs at the sampling temperature and updates, SPMD over the trainer's ranks.

    Tensors are those of the whole step, equal on every rank; each data rank computes its share of
    the rows, and results are again the whole step's on every rank.
    """

    def __init__(
        self,
        shape: ModelShape,
        world: World,
        settings: ActorConfig,
        directory: Path,
        temperature: float,
        total_updates: int,
        *,
        with_reference: bool = True,
        exact: bool = False,
    ) -> None:
        """Without a reference no copy of the initial weights is kept, and `reference_logprobs` is
        not there.

        `exact` is `engine.exact`. Raises ConfigError where that cannot be had on this machine.
        """
        self.temperature, self._chunk_tokens = temperature, settings.logprob_chunk_tokens
        runner = ModelRunner(shape, world, "vocabulary", settings, total_updates, exact=exact)
        super().__init__(runner, directory)
        runner.weights.load_directory(directory)
        # With adapters the initial weights are the model without them.
        keeps_copy = with_reference and not isinstance(runner.weights, LoraWeights)
        self._reference = (
            runner.copy_of_weights(on_device=settings.reference_on_device) if keeps_copy else {}
        )
        runner.start_training()

    def logprobs(
        self,
        tokens: Tensor,
        lengths: Tensor,
        *,
        mask: Tensor | None = None,
        temperature: float | None = None,
        kept: KeptTokens | None = None,
        routes: Tensor | None = None,
    ) -> Tensor:
        """Log-probability of each next token under the policy; int64 [B, S] and [B] to float32 [B,
        S-1].

        Only those in `mask` bool [B, S-1] are computed, where given; the others are zero.

        `temperature` is the sampling temperature where None; `kept` [B, S-1] has what tokens were
        drawn among, which is then what their probabilities sum to 1 over. Tokens go through the
        experts of `routes` [B, S-1, L, K] where given; `runner.routes_differing` then says how many
        would have gone elsewhere.
        """
        chosen = self.temperature if temperature is None else temperature
        settings: dict[str, Any] = {"temperature": chosen, "chunk_tokens": self._chunk_tokens}
        return _logprobs(self.runner, tokens, lengths, mask, kept, routes, **settings)

    def with_candidates(self, rows: Rows) -> tuple[Tensor, Rows]:
        """Log-probs float32 [B, S-1] of the mask's tokens, zero elsewhere, and the rows with those
        of their candidates."""
        assert rows.candidates is not None
        ids, columns, places = rows.candidates, 2 + rows.candidates.shape[-1], rows.mask.shape[1]

        def read(output: Tensor, batch: PackedBatch) -> Tensor:
            asked = _within(batch, rows.mask, output.device)
            its = (
                ids[batch.batch_rows, : batch.width - 1]
                .flatten(0, 1)
                .to(output.device)[asked.target_rows]
                .long()
            )
            found, _ = _score(
                self.runner, output, asked, self.temperature, self._chunk_tokens, None, its
            )
            return asked.unpack_targets(found).flatten(1)

        packed = self.runner.rows(rows.tokens, rows.lengths, places * columns, read).view(
            *rows.mask.shape, columns
        )
        return packed[..., 0], dataclasses.replace(rows, candidate_logprobs=packed[..., 1:])

    def reference_logprobs(self, tokens: Tensor, lengths: Tensor, **given: Any) -> Tensor:
        """`logprobs`, and what it is given by name, under the initial weights: swapped in, or with
        the adapters off."""
        weights = self.runner.weights
        initial = (
            weights.adapters_off()
            if isinstance(weights, LoraWeights)
            else self.runner.swapped(self._reference)
        )
        with initial:
            return self.logprobs(tokens, lengths, **given)

    def train(
        self,
        minibatch: Rows,
        loss: PolicyLoss[Any],
        *,
        denominator: float | None = None,
        group: int = 1,
        before: Tensor | None = None,
        entropies: Tensor | None = None,
    ) -> dict[str, float]:
        """One optimizer step on a minibatch; returns the loss's statistics, `entropy`, `grad_norm`
        and `lr`.

        Log-probs and entropy are among what tokens were drawn among and through their experts,
        where the minibatch has these. Of its candidates the loss is given the log-probs with the
        rows. `denominator` is the loss's; the number of tokens in the mask where None. The loss
        sees every `group` rows in a row together, in their order. The mask's log-probs as they are
        before the step are written to `before`, and its entropies to `entropies`, both float32 [B,
        S-1], on every rank; zero outside the mask.
        """
        seen = {name: torch.zeros(minibatch.mask.shape) for name in ("logprobs", "entropies")}
        wanted = {
            name: table
            for name, table in zip(seen, (before, entropies), strict=True)
            if table is not None
        }
        tokens = max(float(minibatch.mask.sum()), 1.0)
        shared = tokens if denominator is None else denominator

        def packed_loss(output: Tensor, batch: PackedBatch) -> tuple[Tensor, Stats]:
            rows = minibatch.select(batch.batch_rows, batch.width).to(output.device)
            batch = _only_targets(batch, rows.mask)
            candidates = (
                None
                if rows.candidates is None
                else rows.candidates.flatten(0, 1)[batch.target_rows].long()
            )
            logprobs, entropy = _score(
                *(
                    self.runner,
                    output,
                    batch,
                    self.temperature,
                    self._chunk_tokens,
                    rows.kept,
                    candidates,
                ),
                with_entropy=True,
            )
            assert entropy is not None
            unpacked = {
                "logprobs": batch.unpack_targets(logprobs),
                "entropies": batch.unpack_targets(entropy),
            }
            if candidates is not None:
                rows = dataclasses.replace(rows, candidate_logprobs=unpacked["logprobs"][..., 1:])
                unpacked["logprobs"] = unpacked["logprobs"][..., 0]
            if self.runner.world.speaks_for_outputs:
                for name in wanted:
                    seen[name][batch.batch_rows, : rows.mask.shape[1]] = (
                        unpacked[name].detach().cpu()
                    )
            value, stats = loss(unpacked["logprobs"], unpacked["entropies"], rows, shared)
            return value, stats | {"entropy": unpacked["entropies"].detach().sum() / tokens}

        stats = self.runner.update(
            self.runner.share(minibatch.tokens, minibatch.lengths, group, minibatch.routes),
            packed_loss,
        )
        for name, table in wanted.items():
            table.copy_(self.runner.world.sum_(seen[name]))
        return stats


class FrozenPolicy:
    """A language model that is not trained: log-probs of given tokens, SPMD over its ranks, as
    `Policy` has them."""

    def __init__(
        self,
        shape: ModelShape,
        world: World,
        settings: MegatronModelConfig,
        directory: Path,
        chunk_tokens: int,
    ) -> None:
        """Logits exist for `chunk_tokens` tokens at a time."""
        self._runner, self._chunk_tokens = (
            ModelRunner(shape, world, "vocabulary", settings),
            chunk_tokens,
        )
        self._runner.weights.load_directory(directory)

    def logprobs(
        self,
        tokens: Tensor,
        lengths: Tensor,
        *,
        mask: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Log-probability of each next token; int64 [B, S] and [B] to float32 [B, S-1], zeros past
        a sequence's end.

        Only those in `mask` bool [B, S-1] are computed, where given; the others are zero.
        """
        settings: dict[str, Any] = {"temperature": temperature, "chunk_tokens": self._chunk_tokens}
        return _logprobs(self._runner, tokens, lengths, mask, None, None, **settings)

    def taught(
        self,
        tokens: Tensor,
        lengths: Tensor,
        top: int,
        below: int,
        *,
        mask: Tensor | None = None,
        temperature: float = 1.0,
    ) -> TaughtTokens:
        """Also the `top` most probable tokens of the ids below `below`, at most all of these."""
        count = min(top, below)

        def read(output: Tensor, batch: PackedBatch) -> Tensor:
            batch, head = _within(batch, mask, output.device), self._runner.chunks[-1].output_layer
            ids = head.top(
                output[0], batch.target_index, count, below=below, chunk_tokens=self._chunk_tokens
            )
            found, _ = _score(
                self._runner, output, batch, temperature, self._chunk_tokens, None, ids
            )
            return batch.unpack_targets(torch.cat([found, ids.float()], 1)).flatten(1)

        columns, places = 2 + 2 * count, tokens.shape[1] - 1
        packed = self._runner.rows(tokens, lengths, places * columns, read)
        return TaughtTokens.unpacked(packed.view(len(tokens), places, columns))


def stored_logprobs(
    source: Source, settings: MegatronModelConfig, tokens: Tensor, lengths: Tensor, mask: Tensor
) -> Tensor:
    """Log-probability of each next token at temperature 1 under a stored language model, in this
    process alone.

    int64 [B, S] and [B] to float32 [B, S-1], zero outside the mask, bool [B, S-1]. No world may be
    there: one is made, and left at the end. Raises AlignerError for a sequence that is longer than
    the model's positions.
    """
    world = worlds.initialize_alone(seed=1)
    try:
        runner = ModelRunner(
            read_config(source.config, "the model's config.json"), world, source.head, settings
        )
        for weights in source.weights():
            for name, tensor in weights.items():
                runner.weights.write(name, tensor)
        return _logprobs(
            runner, tokens, lengths, mask, None, None, temperature=1.0, chunk_tokens=_CHUNK_TOKENS
        )
    finally:
        worlds.shutdown()


def _logprobs(
    runner: ModelRunner,
    tokens: Tensor,
    lengths: Tensor,
    mask: Tensor | None,
    kept: KeptTokens | None,
    routes: Tensor | None,
    *,
    temperature: float,
    chunk_tokens: int,
) -> Tensor:
    def read(output: Tensor, batch: PackedBatch) -> Tensor:
        batch = _within(batch, mask, output.device)
        its = (
            None
            if kept is None
            else kept.at((batch.batch_rows, slice(batch.width - 1))).to(output.device)
        )
        return batch.unpack_targets(
            _score(runner, output, batch, temperature, chunk_tokens, its)[0]
        )

    return runner.rows(tokens, lengths, tokens.shape[1] - 1, read, routes)


def _score(
    runner: ModelRunner,
    output: Tensor,
    batch: PackedBatch,
    temperature: float,
    chunk_tokens: int,
    kept: KeptTokens | None,
    candidates: Tensor | None = None,
    *,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies of the micro-batch's M targets; `kept` is [N, L-1], `candidates` [M,
    k]."""
    head: VocabularyHead = runner.chunks[-1].output_layer
    return head.logprobs(
        output[0],
        batch.target_index,
        batch.targets,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
        kept=(
            None
            if kept is None
            else kept.at(torch.unravel_index(batch.target_rows, kept.counts.shape))
        ),
        candidates=candidates,
    )


def _within(batch: PackedBatch, mask: Tensor | None, device: torch.device) -> PackedBatch:
    """The batch without the targets outside the mask, bool [B, S-1] of all rows."""
    return (
        batch
        if mask is None
        else _only_targets(batch, mask[batch.batch_rows, : batch.width - 1].to(device))
    )


def _only_targets(batch: PackedBatch, mask: Tensor) -> PackedBatch:
    """The batch without the targets outside `mask` bool [N, L-1]: nothing is projected for
    prompts."""
    chosen = mask.flatten()[batch.target_rows]
    names = ("target_index", "targets", "target_rows")
    return dataclasses.replace(batch, **{name: getattr(batch, name)[chosen] for name in names})
