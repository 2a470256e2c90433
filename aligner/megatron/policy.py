"""Language models that compute log-probs: the trained policy and its reference, and frozen models.

- `Policy`: the actor that a run trains, with the reference model of its initial weights.
- `FrozenPolicy`: a model that is not trained, such as a teacher.
- `stored_logprobs`: log-probs under a stored model, computed in a single process.
"""

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.data.export import Source
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import (
    GuidedTokens,
    PolicyLoss,
    Rows,
    SamplingSupport,
    Stats,
    TeacherTopK,
)
from aligner.megatron import world as worlds
from aligner.megatron.grammar_masks import GrammarMasks
from aligner.megatron.logprobs import TokenMasks
from aligner.megatron.lora import LoraWeights
from aligner.megatron.model_checkpoint import CheckpointedModel
from aligner.megatron.output_heads import VocabularyHead
from aligner.megatron.packing import PackedBatch
from aligner.megatron.runner import ModelRunner
from aligner.megatron.world import World
from aligner.models.hugging_face import read_config
from aligner.models.shape import ModelShape
from aligner.schema import ActorConfig, MegatronModelConfig

# Number of tokens whose logits exist at the same time in `stored_logprobs`.
_CHUNK_TOKENS = 1024


class Policy(CheckpointedModel):
    """The actor: its log-probs at the sampling temperature, its updates, and the reference model.

    Methods are SPMD over the trainer's ranks. Their tensors contain the whole step's rows and are
    equal on every rank. Each data rank computes its part of the rows; results are again the whole
    step's, on every rank, in host memory.
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
        """Load the model from a directory and create its optimizer.

        Args:
            shape: Dimensions of the model.
            world: This rank's view of the trainer's ranks.
            settings: Configuration section `actor`.
            directory: Hugging Face directory of the initial weights.
            temperature: Sampling temperature of the run.
            total_updates: Number of optimizer steps of the learning-rate schedule.
            with_reference: Whether to keep a copy of the initial weights, which
                `reference_logprobs` requires.
            exact: `engine.exact`: use batch-invariant kernels.

        Raises:
            ConfigError: If this machine has no batch-invariant kernels for the model.
        """
        self.temperature = temperature
        self._directory = directory
        self._chunk_tokens = settings.logprob_chunk_tokens
        runner = ModelRunner(shape, world, "vocabulary", settings, total_updates, exact=exact)
        super().__init__(runner, directory)
        runner.weights.load_directory(directory)

        # With LoRA, the frozen model without its adapters is the reference.
        needs_copy = with_reference and not isinstance(runner.weights, LoraWeights)
        self._reference = (
            runner.copy_weights(on_device=settings.reference_on_device) if needs_copy else {}
        )
        runner.start_training()

    def logprobs(
        self,
        tokens: Tensor,
        lengths: Tensor,
        *,
        mask: Tensor | None = None,
        temperature: float | None = None,
        sampling_support: SamplingSupport | None = None,
        guided_tokens: GuidedTokens | None = None,
        expert_routing: Tensor | None = None,
    ) -> Tensor:
        """Return the log-prob of each next token under the policy. Collective.

        Args:
            tokens: Right-padded rows, int64 [B, S].
            lengths: Lengths of the rows in tokens, int64 [B].
            mask: Targets to compute, bool [B, S-1]; None means all.
            temperature: Temperature of the distribution; None means the sampling temperature.
            sampling_support: Sampling support of the targets, [B, S-1]. The probabilities are
                normalized over it.
            guided_tokens: Grammars of the targets, [B, S-1]. The probabilities are normalized over
                the tokens that they allow.
            expert_routing: Recorded expert routing, uint8 or int16 [B, S-1, L, K], which replaces
                the router's choices. Afterwards, `runner.routing_mismatch` is the fraction of
                choices that the router would have made differently.

        Returns:
            float32 [B, S-1]; 0 outside the mask and after the end of a row.
        """
        effective_temperature = self.temperature if temperature is None else temperature
        options: dict[str, Any] = {
            "temperature": effective_temperature,
            "chunk_tokens": self._chunk_tokens,
        }
        return _logprobs(
            self.runner,
            tokens,
            lengths,
            mask,
            sampling_support,
            expert_routing,
            grammar_masks=self._build_grammar_masks(tokens, guided_tokens),
            **options,
        )

    def _build_grammar_masks(
        self, tokens: Tensor, guided_tokens: GuidedTokens | None
    ) -> GrammarMasks | None:
        """Return the source of the masks of some rows; None if no token follows a grammar.

        Raises AlignerError if the model has no tokenizer.
        """
        if guided_tokens is None:
            return None
        return GrammarMasks(self._tokenizer.grammar_vocabulary, tokens, guided_tokens)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """The model's tokenizer, which is read when the first token follows a grammar."""
        return Tokenizer(self._directory)

    def score_candidates(self, rows: Rows) -> tuple[Tensor, Rows]:
        """Return the log-probs of the rows, and the rows with the log-probs of their candidates.

        Collective.

        Args:
            rows: Rows with candidates, int [B, S-1, k].

        Returns:
            The log-prob of each target in the mask, float32 [B, S-1], 0 elsewhere; and the rows
            with `candidate_logprobs`, float32 [B, S-1, k+1], whose last entry is the log-prob of
            all other tokens together.
        """
        assert rows.candidates is not None
        ids = rows.candidates
        grammar_masks = self._build_grammar_masks(rows.tokens, rows.guided_tokens)
        # Log-probs of the target, of its k candidates, and of all other tokens together.
        columns = 2 + rows.candidates.shape[-1]
        targets = rows.mask.shape[1]

        def read_output(output: Tensor, batch: PackedBatch) -> Tensor:
            """Return the log-probs of targets and candidates, float32 [N, (L-1) (2 + k)]."""
            masked = _mask_batch(batch, rows.mask, output.device)
            # The candidates of the micro-batch's targets, int64 [M, k].
            candidates = (
                ids[batch.batch_rows, : batch.width - 1]
                .flatten(0, 1)
                .to(output.device)[masked.target_rows]
                .long()
            )
            logprobs, _ = _score(
                self.runner,
                output,
                masked,
                self.temperature,
                self._chunk_tokens,
                None,
                candidates,
                token_masks=_compute_masks(grammar_masks, masked),
            )
            return masked.unpack_targets(logprobs).flatten(1)

        packed = self.runner.compute_rows(
            rows.tokens, rows.lengths, targets * columns, read_output
        ).view(*rows.mask.shape, columns)
        return packed[..., 0], dataclasses.replace(rows, candidate_logprobs=packed[..., 1:])

    def reference_logprobs(self, tokens: Tensor, lengths: Tensor, **options: Any) -> Tensor:
        """Return the log-prob of each next token under the initial weights. Collective.

        The reference's weights are swapped in for the computation; with LoRA, the adapters are
        disabled instead.

        Args:
            tokens: Right-padded rows, int64 [B, S].
            lengths: Lengths of the rows in tokens, int64 [B].
            **options: Keyword arguments of `logprobs`.

        Returns:
            float32 [B, S-1]; see `logprobs`.
        """
        weights = self.runner.weights
        initial = (
            weights.disable_adapters()
            if isinstance(weights, LoraWeights)
            else self.runner.swap_weights(self._reference)
        )
        with initial:
            return self.logprobs(tokens, lengths, **options)

    def train(
        self,
        minibatch: Rows,
        loss: PolicyLoss[Any],
        *,
        denominator: float | None = None,
        group_size: int = 1,
        logprobs_out: Tensor | None = None,
        entropies_out: Tensor | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step on a minibatch. Collective.

        Log-probs and entropies are normalized over the sampling support and over the tokens that
        grammars allow, and computed with the recorded routing, if the minibatch has them. If it has
        candidates, the loss receives their log-probs with the rows.

        Args:
            minibatch: Rows to train on, [B, S].
            loss: Policy loss; receives the rows of one micro-batch, with their log-probs and
                entropies [N, L-1].
            denominator: Denominator of the loss; None means the number of tokens in the mask.
            group_size: Number of consecutive rows that the loss must receive together, in their
                order.
            logprobs_out: Destination of the log-probs before the step, float32 [B, S-1]; 0 outside
                the mask, equal on every rank.
            entropies_out: Destination of the entropies before the step, float32 [B, S-1]; 0 outside
                the mask, equal on every rank.

        Returns:
            The statistics of the loss, `entropy`, and the results of `ModelRunner.update`, such as
            `grad_norm` and `lr`.
        """
        grammar_masks = self._build_grammar_masks(minibatch.tokens, minibatch.guided_tokens)
        collected = {name: torch.zeros(minibatch.mask.shape) for name in ("logprobs", "entropies")}
        outputs = {
            name: table
            for name, table in zip(collected, (logprobs_out, entropies_out), strict=True)
            if table is not None
        }
        # An empty mask must not cause a division by zero.
        tokens = max(float(minibatch.mask.sum()), 1.0)
        global_denominator = tokens if denominator is None else denominator

        def packed_loss(output: Tensor, batch: PackedBatch) -> tuple[Tensor, Stats]:
            """Return the loss of a micro-batch, a float32 scalar, and its statistics."""
            rows = minibatch.select(batch.batch_rows, batch.width).to(output.device)
            batch = _select_targets(batch, rows.mask)
            candidates = (
                None
                if rows.candidates is None
                else rows.candidates.flatten(0, 1)[batch.target_rows].long()
            )
            logprobs, entropy = _score(
                self.runner,
                output,
                batch,
                self.temperature,
                self._chunk_tokens,
                rows.sampling_support,
                candidates,
                with_entropy=True,
                token_masks=_compute_masks(grammar_masks, batch),
            )
            assert entropy is not None
            unpacked = {
                "logprobs": batch.unpack_targets(logprobs),
                "entropies": batch.unpack_targets(entropy),
            }
            if candidates is not None:
                # Column 0 is the target; the others are the candidates and all other tokens.
                rows = dataclasses.replace(rows, candidate_logprobs=unpacked["logprobs"][..., 1:])
                unpacked["logprobs"] = unpacked["logprobs"][..., 0]
            if self.runner.world.is_output_rank:
                for name in outputs:
                    collected[name][batch.batch_rows, : rows.mask.shape[1]] = (
                        unpacked[name].detach().cpu()
                    )
            value, stats = loss(
                unpacked["logprobs"], unpacked["entropies"], rows, global_denominator
            )
            return value, stats | {"entropy": unpacked["entropies"].detach().sum() / tokens}

        stats = self.runner.update(
            self.runner.pack(
                minibatch.tokens, minibatch.lengths, group_size, minibatch.expert_routing
            ),
            packed_loss,
        )
        # Each row is nonzero on one rank only, so the all-reduce assembles the whole minibatch.
        for name, table in outputs.items():
            table.copy_(self.runner.world.all_reduce_sum(collected[name]))
        return stats


class FrozenPolicy:
    """A language model that is not trained: log-probs and most probable tokens.

    The teacher server uses it. Methods are SPMD over the role's ranks, like those of `Policy`.
    """

    def __init__(
        self,
        shape: ModelShape,
        world: World,
        settings: MegatronModelConfig,
        directory: Path,
        chunk_tokens: int,
    ) -> None:
        """Load the model from a Hugging Face directory.

        Args:
            shape: Dimensions of the model.
            world: This rank's view of the role's ranks.
            settings: Configuration section of the model.
            directory: Hugging Face directory of the weights.
            chunk_tokens: Number of tokens whose logits exist at the same time.
        """
        self._runner = ModelRunner(shape, world, "vocabulary", settings)
        self._chunk_tokens = chunk_tokens
        self._runner.weights.load_directory(directory)

    def logprobs(
        self,
        tokens: Tensor,
        lengths: Tensor,
        *,
        mask: Tensor | None = None,
        temperature: float = 1.0,
        grammar_masks: GrammarMasks | None = None,
    ) -> Tensor:
        """Return the log-prob of each next token. Collective.

        Args:
            tokens: Right-padded rows, int64 [B, S].
            lengths: Lengths of the rows in tokens, int64 [B].
            mask: Targets to compute, bool [B, S-1]; None means all.
            temperature: Temperature of the distribution.
            grammar_masks: Source of the masks of targets that follow a grammar, over whose allowed
                tokens the probabilities are normalized.

        Returns:
            float32 [B, S-1]; 0 outside the mask and after the end of a row.
        """
        return _logprobs(
            self._runner,
            tokens,
            lengths,
            mask,
            None,
            None,
            temperature=temperature,
            chunk_tokens=self._chunk_tokens,
            grammar_masks=grammar_masks,
        )

    def top_k_logprobs(
        self,
        tokens: Tensor,
        lengths: Tensor,
        k: int,
        id_limit: int,
        *,
        mask: Tensor | None = None,
        temperature: float = 1.0,
        grammar_masks: GrammarMasks | None = None,
    ) -> TeacherTopK:
        """Return the log-prob of each next token, and the k most probable tokens. Collective.

        Args:
            tokens: Right-padded rows, int64 [B, S].
            lengths: Lengths of the rows in tokens, int64 [B].
            k: Number of most probable tokens; at most `id_limit` are returned.
            id_limit: Only token ids below it are returned.
            mask: Targets to compute, bool [B, S-1]; None means all.
            temperature: Temperature of the distribution.
            grammar_masks: See `logprobs`. If a grammar allows fewer than k tokens, the others have
                probability 0.
        """
        count = min(k, id_limit)

        def read_output(output: Tensor, batch: PackedBatch) -> Tensor:
            """Return the top-k ids and log-probs at a micro-batch's targets."""
            batch = _mask_batch(batch, mask, output.device)
            token_masks = _compute_masks(grammar_masks, batch)
            head = self._runner.chunks[-1].output_layer
            ids = head.top_ids(
                output[0],
                batch.target_index,
                count,
                id_limit=id_limit,
                chunk_tokens=self._chunk_tokens,
                token_masks=token_masks,
            )
            logprobs, _ = _score(
                self._runner,
                output,
                batch,
                temperature,
                self._chunk_tokens,
                None,
                ids,
                token_masks=token_masks,
            )
            # float32 represents ids up to 2^24 exactly.
            return batch.unpack_targets(torch.cat([logprobs, ids.float()], 1)).flatten(1)

        # The layout of TeacherTopK.pack: log-probs of the target, of the k tokens and of all other
        # tokens, then the k ids.
        columns = 2 + 2 * count
        targets = tokens.shape[1] - 1
        packed = self._runner.compute_rows(tokens, lengths, targets * columns, read_output)
        return TeacherTopK.unpack(packed.view(len(tokens), targets, columns))


def stored_logprobs(
    source: Source,
    settings: MegatronModelConfig,
    tokens: Tensor,
    lengths: Tensor,
    mask: Tensor,
    guided_tokens: GuidedTokens | None = None,
) -> Tensor:
    """Return the log-prob of each next token under a stored language model, at temperature 1.

    The function runs in this process only. It creates a world of one rank and destroys it at the
    end, so no world may exist.

    Args:
        source: Stored model.
        settings: Configuration section of the model.
        tokens: Right-padded rows, int64 [B, S].
        lengths: Lengths of the rows in tokens, int64 [B].
        mask: Targets to compute, bool [B, S-1].
        guided_tokens: Grammars of the targets, [B, S-1]; see `Policy.logprobs`.

    Returns:
        float32 [B, S-1]; 0 outside the mask.

    Raises:
        AlignerError: If a sequence is longer than the model's positions.
    """
    world = worlds.initialize_single_process(seed=1)
    try:
        runner = ModelRunner(
            read_config(source.config, "the model's config.json"), world, source.head, settings
        )
        for weights in source.weights():
            for name, tensor in weights.items():
                runner.weights.write(name, tensor)
        grammar_masks = None
        if guided_tokens is not None:
            vocabulary = Tokenizer(source.companions).grammar_vocabulary
            grammar_masks = GrammarMasks(vocabulary, tokens, guided_tokens)
        return _logprobs(
            runner,
            tokens,
            lengths,
            mask,
            None,
            None,
            temperature=1.0,
            chunk_tokens=_CHUNK_TOKENS,
            grammar_masks=grammar_masks,
        )
    finally:
        worlds.shutdown()


def _logprobs(
    runner: ModelRunner,
    tokens: Tensor,
    lengths: Tensor,
    mask: Tensor | None,
    sampling_support: SamplingSupport | None,
    expert_routing: Tensor | None,
    *,
    temperature: float,
    chunk_tokens: int,
    grammar_masks: GrammarMasks | None = None,
) -> Tensor:
    """Return the log-prob of each next token, float32 [B, S-1]; see `Policy.logprobs`."""

    def read_output(output: Tensor, batch: PackedBatch) -> Tensor:
        """Return the log-probs of a micro-batch's targets, float32 [N, L-1]."""
        batch = _mask_batch(batch, mask, output.device)
        batch_kept_tokens = (
            None
            if sampling_support is None
            else sampling_support.select((batch.batch_rows, slice(batch.width - 1))).to(
                output.device
            )
        )
        logprobs, _ = _score(
            runner,
            output,
            batch,
            temperature,
            chunk_tokens,
            batch_kept_tokens,
            token_masks=_compute_masks(grammar_masks, batch),
        )
        return batch.unpack_targets(logprobs)

    return runner.compute_rows(tokens, lengths, tokens.shape[1] - 1, read_output, expert_routing)


def _score(
    runner: ModelRunner,
    output: Tensor,
    batch: PackedBatch,
    temperature: float,
    chunk_tokens: int,
    sampling_support: SamplingSupport | None,
    candidates: Tensor | None = None,
    *,
    with_entropy: bool = False,
    token_masks: TokenMasks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probs and entropies of a micro-batch's targets.

    Args:
        runner: Model that computed the output.
        output: Final hidden states, [1, T, H], or [1, T/TP, H] with sequence parallelism.
        batch: Micro-batch with M targets.
        temperature: Temperature of the distribution.
        chunk_tokens: Number of tokens whose logits exist at the same time.
        sampling_support: Sampling support, [N, L-1].
        candidates: Candidate token ids of each target, int64 [M, k].
        with_entropy: Whether to compute entropies.
        token_masks: Allowed tokens of the targets; None means the whole vocabulary.

    Returns:
        See `vocab_parallel_logprobs`.
    """
    head: VocabularyHead = runner.chunks[-1].output_layer
    return head.logprobs(
        output[0],
        batch.target_index,
        batch.targets,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
        sampling_support=(
            None
            if sampling_support is None
            else sampling_support.select(
                torch.unravel_index(batch.target_rows, sampling_support.counts.shape)
            )
        ),
        candidates=candidates,
        token_masks=token_masks,
    )


def _compute_masks(grammar_masks: GrammarMasks | None, batch: PackedBatch) -> TokenMasks | None:
    """Return the allowed tokens of a micro-batch's targets; None means the whole vocabulary."""
    return None if grammar_masks is None else grammar_masks.compute(batch)


def _mask_batch(batch: PackedBatch, mask: Tensor | None, device: torch.device) -> PackedBatch:
    """Return the micro-batch without the targets outside the mask, bool [B, S-1] of all rows."""
    return (
        batch
        if mask is None
        else _select_targets(batch, mask[batch.batch_rows, : batch.width - 1].to(device))
    )


def _select_targets(batch: PackedBatch, mask: Tensor) -> PackedBatch:
    """Return the micro-batch without the targets outside `mask`, bool [N, L-1].

    This saves the vocabulary projection of prompt tokens.
    """
    is_selected = mask.flatten()[batch.target_rows]
    names = ("target_index", "targets", "target_rows")
    return dataclasses.replace(batch, **{name: getattr(batch, name)[is_selected] for name in names})
