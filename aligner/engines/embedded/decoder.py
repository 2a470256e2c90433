"""Forward pass of a decoder-only transformer with a KV cache, on one tensor-parallel rank.

A step may combine two kinds of work: it decodes new tokens of sequences in the KV cache, its rows,
and it prefills prompts. All tokens of a step go through the layers as one packed tensor, the tokens
of the decoding rows first and the prompts' tokens after them; only attention and delta nets treat
the two kinds separately.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.engines.embedded.attention_mixer import AttentionMixer
from aligner.engines.embedded.cache import KVCache
from aligner.engines.embedded.core_attention import CoreAttention
from aligner.engines.embedded.decoder_step import Step
from aligner.engines.embedded.delta_net_mixer import DeltaNetMixer
from aligner.engines.embedded.feed_forward import Activation, FeedForward
from aligner.engines.embedded.forward_context import ContextBuilder, ForwardContext
from aligner.engines.embedded.latent_attention_mixer import LatentAttentionMixer
from aligner.engines.embedded.matmuls import Matmuls
from aligner.engines.embedded.mixture_of_experts import MixtureOfExperts
from aligner.engines.embedded.normalization import Norms
from aligner.engines.embedded.tensor_parallel import TensorParallelRanks
from aligner.models.shape import ModelShape

_Mixer = AttentionMixer | LatentAttentionMixer | DeltaNetMixer


class Decoder:
    """Decoder-only transformer on one tensor-parallel rank of a replica.

    The forward pass and the exchange of logits and tensors are collective: all tensor-parallel
    ranks of the replica must call them in the same order.

    Attributes:
        is_exact: Whether the decoder uses batch-invariant kernels (`engine.exact`).
        is_sliced: Whether a step with one token per row reads only the tokens that each row has.
    """

    def __init__(
        self,
        shape: ModelShape,
        tensor_parallel_size: int,
        rank: int,
        group: ProcessGroup | None,
        device: torch.device,
        *,
        expert_parallel_size: int = 1,
        exact: bool = False,
        packed: bool = False,
        sliced: bool = False,
    ) -> None:
        """Create a decoder without weights.

        Args:
            shape: Dimensions of the model.
            tensor_parallel_size: Number of tensor-parallel ranks (TP).
            rank: Index of this rank among the tensor-parallel ranks.
            group: Process group of the tensor-parallel ranks; unused if there is one rank.
            device: Device of the weights and of the KV cache.
            expert_parallel_size: Number of groups of ranks that the experts are distributed over.
            exact: Value of `engine.exact`.
            packed: Value of `engine.packed_weights`.
            sliced: Whether a step with one token per row reads only the tokens that each row has.
                The KV cache must then be stored by token (see `KVCache`).
        """
        self.is_exact = exact
        self.is_sliced = sliced
        self._shape = shape
        self._ranks = TensorParallelRanks(tensor_parallel_size, rank, group)
        self._context_builder = ContextBuilder(
            shape, tensor_parallel_size, device, exact=exact, sliced=sliced
        )
        self._weights: dict[str, Tensor] = {}
        """Current weights, by their megatron-core names. All parts of the decoder read this
        dictionary."""
        self._matmuls = Matmuls(self._weights, self._ranks, exact=exact, packed=packed)
        self._norms = Norms(shape, self._weights, self._ranks)
        self._mixers = self._build_mixers()
        self._feed_forwards = self._build_feed_forwards(expert_parallel_size)

    def _build_mixers(self) -> list[_Mixer]:
        """Return the attention or the gated delta net of each layer.

        Layers of the same kind share an object, which has no state of its own.
        """
        shape = self._shape
        ranks = self._ranks
        core = CoreAttention(shape, self._weights, exact=self.is_exact)
        attention: _Mixer
        if shape.latent_attention is None:
            attention = AttentionMixer(shape, ranks.size, self._matmuls, self._norms, core)
        else:
            attention = LatentAttentionMixer(
                shape,
                shape.latent_attention,
                self._weights,
                ranks.size,
                self._matmuls,
                self._norms,
                core,
            )
        if shape.delta_net is None:
            return [attention] * shape.num_layers
        delta_net = DeltaNetMixer(shape, shape.delta_net, self._weights, ranks.size, self._matmuls)
        return [delta_net if layer.has_delta_net else attention for layer in shape.layers]

    def _build_feed_forwards(
        self, expert_parallel_size: int
    ) -> list[FeedForward | MixtureOfExperts]:
        """Return the feed-forward network or the experts of each layer."""
        shape = self._shape
        activation = Activation(shape)
        dense = FeedForward(self._matmuls, activation)
        if shape.experts is None:
            return [dense] * shape.num_layers
        experts = MixtureOfExperts(
            shape.experts,
            self._weights,
            self._ranks,
            self._matmuls,
            activation,
            expert_parallel_size,
        )
        return [experts if layer.has_experts else dense for layer in shape.layers]

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Set the weights, by their megatron-core names.

        Call this method again whenever the values of the weights change, because packed copies of
        the old values may exist.
        """
        self._weights.clear()
        self._weights.update(weights)
        self._matmuls.discard_packed_weights()

    def forward(self, step: Step, cache: KVCache) -> Tensor:
        """Compute this rank's shard of the logits of each row's next token. Collective.

        The pass writes the keys and values of all tokens into the cache.

        Returns:
            The logits of the decoding rows, followed by those of the C new rows, [R + C, V / TP];
            no rows if `step.needs_logits` is False.
        """
        x = self.compute_hidden_states(step, cache)
        rows = len(step.tokens)
        prompts = step.prompts
        if prompts is not None:
            # Only the last token of a prompt has a next token to predict.
            last_tokens = rows + prompts.lengths.cumsum(0) - 1
            x = torch.cat((x[:rows], x[last_tokens][prompts.prompt_indices]))

        # Zero rows skip the work of the output layer, and the result still has its width.
        return self.compute_logits(x if step.needs_logits else x[:0])

    def compute_hidden_states(self, step: Step, cache: KVCache) -> Tensor:
        """Compute the output of the last layer for all tokens of a step. Collective.

        The pass writes the keys and values of all tokens into the cache.

        Returns:
            The hidden states of the decoding rows, followed by those of the prompts' tokens,
            [R + N, hidden].
        """
        dtype = self._weights["embedding.word_embeddings.weight"].dtype
        context = self._context_builder.build(step, cache, dtype)
        x = self._embed(context.tokens, context.positions)
        for layer in range(self._shape.num_layers):
            x = self._apply_layer(layer, x, context)
        return x

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute this rank's shard of the logits, [N, V / TP], of hidden states [N, hidden]."""
        normed = self._norms.normalize(hidden_states, "decoder.final_layernorm")
        if self._shape.logit_scale != 1:
            normed = normed * self._shape.logit_scale
        head = "embedding.word_embeddings" if self._shape.tied_embeddings else "output_layer"
        logits = self._matmuls.linear(normed, head)
        softcap = self._shape.logit_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    def gather_logits(self, logits_shard: Tensor) -> Tensor | None:
        """Gather the shards of the logits on the replica's first rank. Collective.

        Args:
            logits_shard: This rank's part of the vocabulary, [B, V / TP].

        Returns:
            The logits [B, V] on the first rank, None on the other ranks.
        """
        logits = self._ranks.gather(logits_shard)
        # The slice drops the logits of the vocabulary's padding, which the last ranks compute.
        return None if logits is None else logits[:, : self._shape.vocab_size]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcast a tensor in place from the replica's first rank, and return it. Collective."""
        return self._ranks.broadcast(tensor)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Look up the token embeddings, and add the model's learned position embeddings, if any."""
        table = self._weights["embedding.word_embeddings.weight"]
        if self._ranks.size == 1:
            x = F.embedding(tokens, table)
        else:
            # Each rank has a part of the vocabulary. A rank contributes zeros for the tokens of the
            # other ranks, so that the all-reduce returns the complete embeddings.
            local_tokens = tokens - self._ranks.rank * len(table)
            is_local = (local_tokens >= 0) & (local_tokens < len(table))
            partial = F.embedding(local_tokens.where(is_local, 0), table) * is_local[:, None]
            x = self._ranks.all_reduce(partial)
        if self._shape.learned_positions:
            x = x + F.embedding(positions, self._weights["embedding.position_embeddings.weight"])
        scale = self._shape.embedding_factor
        return x if scale == 1 else x * scale

    def _apply_layer(self, layer: int, x: Tensor, context: ForwardContext) -> Tensor:
        """Compute one transformer layer, from x [N, hidden] to [N, hidden]."""
        prefix = f"decoder.layers.{layer}."
        normed = self._normalize_input(x, prefix + "input_layernorm")
        mixed = self._mixers[layer].mix(layer, normed, context)

        # Parallel residual, as in GPT-NeoX: attention and MLP both read the layer's input.
        if self._shape.parallel_residual:
            residual = x + mixed
            normed = self._normalize_input(x, prefix + "pre_mlp_layernorm")
            return residual + self._feed_forwards[layer].apply(layer, normed, context)

        x = x + self._prepare_output(mixed, prefix + "self_attn_bda.norm")
        normed = self._normalize_input(x, prefix + "pre_mlp_layernorm")
        output = self._feed_forwards[layer].apply(layer, normed, context)
        # The sum above is a new tensor, so the in-place addition overwrites nothing else.
        return x.add_(self._prepare_output(output, prefix + "mlp_bda.norm"))

    def _normalize_input(self, x: Tensor, norm: str) -> Tensor:
        """Return the residual stream as attention or feed-forward network read it."""
        return x if self._shape.norm_placement == "after" else self._norms.normalize(x, norm)

    def _prepare_output(self, x: Tensor, norm: str) -> Tensor:
        """Return an output of attention or feed-forward network as it is added to the residual
        stream."""
        if self._shape.norm_placement != "before":
            x = self._norms.normalize(x, norm)
        scale = self._shape.residual_scale
        return x if scale == 1 else x * scale
