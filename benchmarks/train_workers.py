"""Workers of benchmarks.train and benchmarks.device: ranks of our trainer, and a plain training
step with transformers and torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from aligner.data.types import Experience
    from benchmarks.processes import Way

PROMPT_TOKENS = 8
CLIP_GRAD_NORM = 1.0
ADAM = {"learning_rate": 1e-6, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}


def make_experience(
    lengths: Sequence[int], vocab_size: int, prompt_tokens: int = PROMPT_TOKENS, samples: int = 1
) -> Experience:
    """Return random tokens of the given lengths, with random advantages.

    Each group of `samples` adjacent sequences has the same prompt.
    """
    import torch

    from aligner.data.types import Experience, build_response_mask

    generator = torch.Generator().manual_seed(0)
    counts, width = torch.tensor(lengths), max(lengths)
    tokens = torch.randint(0, vocab_size, (len(lengths), width), generator=generator)
    tokens[:, :prompt_tokens] = tokens[::samples, :prompt_tokens].repeat_interleave(samples, 0)
    mask = build_response_mask(counts, torch.full_like(counts, prompt_tokens), width)
    advantages = torch.randn(mask.shape, generator=generator)
    old = torch.full(mask.shape, -float(torch.tensor(float(vocab_size)).log()))
    zeros = torch.zeros(mask.shape)
    return Experience(
        tokens=tokens,
        lengths=counts,
        mask=mask,
        prompt_lengths=torch.full_like(counts, prompt_tokens),
        engine_logprobs=old,
        weight_versions=torch.zeros_like(mask, dtype=torch.int64),
        finish_reasons=torch.zeros_like(counts),
        groups=torch.arange(len(lengths)),
        scores=torch.zeros(len(lengths)),
        rewards=zeros,
        values=zeros,
        old_logprobs=old,
        reference_logprobs=old,
        advantages=advantages,
        returns=zeros,
    )


class Ours:
    """One rank of aligner's policy."""

    def __init__(
        self, directory: str, way: Way, micro_batch_tokens: int, precision: str = "fp32"
    ) -> None:
        from aligner.data.model_directory import read_shape
        from aligner.megatron import world as worlds
        from aligner.megatron.policy import Policy
        from aligner.schema import ActorConfig, OptimizerConfig, ParallelConfig

        world = worlds.initialize(ParallelConfig(**(way.layout or {})), seed=1, timeout_s=120)
        self._shape = read_shape(Path(directory))
        optimizer = OptimizerConfig(**ADAM, clip_grad_norm=CLIP_GRAD_NORM)
        settings = ActorConfig(
            parallel=world.layout,
            optimizer=optimizer,
            micro_batch_tokens=micro_batch_tokens,
            precision=precision,
        )
        self._policy = Policy(
            self._shape, world, settings, Path(directory), 1.0, total_updates=1000
        )

    def step(
        self, lengths: Sequence[int], prompt_tokens: int = PROMPT_TOKENS, samples: int = 1
    ) -> float:
        import torch.distributed as dist

        from aligner.proof.reference import compute_loss

        experience = make_experience(lengths, self._shape.vocab_size, prompt_tokens, samples)
        dist.barrier()
        begin = time.perf_counter()
        self._policy.train(experience, compute_loss)
        return time.perf_counter() - begin

    def products(self, lengths: Sequence[int]) -> float:
        """Return the time in seconds of the GEMMs of this rank's linear layers and output layer in
        a step.

        There are three GEMMs per weight and micro-batch: the output, and the gradients of input and
        weight. Attention is not included.
        """
        import torch
        import torch.distributed as dist

        experience = make_experience(lengths, self._shape.vocab_size)
        runner = self._policy.runner
        batches = runner.pack(experience.tokens, experience.lengths)
        work: list[tuple[int, Tensor]] = []
        for batch in batches:
            scored = int(experience.mask[batch.batch_rows].sum())
            for chunk in runner.chunks:
                layers = [weight for weight in chunk.decoder.parameters() if weight.dim() == 2]
                work += [(batch.tokens.numel(), weight) for weight in layers]
                if chunk.post_process:
                    work.append((scored, chunk.output_layer.projection))
        with torch.no_grad():
            like = {"device": work[0][1].device, "dtype": work[0][1].dtype}
            inputs = {
                (count, size): torch.randn(count, size, **like)
                for count, weight in work
                for size in weight.shape
            }
            outputs = {key: torch.empty(key, **like) for key in inputs} | {
                weight.shape: torch.empty_like(weight) for _, weight in work
            }

            def run() -> None:
                for count, weight in work:
                    rows, columns = weight.shape
                    x, gradient = inputs[count, columns], inputs[count, rows]
                    torch.mm(x, weight.t(), out=outputs[count, rows])
                    torch.mm(gradient, weight, out=outputs[count, columns])
                    torch.mm(gradient.t(), x, out=outputs[weight.shape])

            run()
            dist.barrier()
            _wait_for_device()
            begin = time.perf_counter()
            run()
            _wait_for_device()
            return time.perf_counter() - begin

    def peak_bytes(self) -> float:
        """Return the peak memory in bytes that torch has allocated on the GPU; 0 on a CPU."""
        import torch

        return float(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0.0


class Publishing:
    """Weights of a trainer, and an engine of the same process that receives them in place."""

    def __init__(self, model: str, precision: str, device: str) -> None:
        from datetime import timedelta

        import torch

        from aligner.engines.embedded.embedded_engine import EmbeddedEngine
        from aligner.megatron.world import initialize_single_process
        from aligner.models.weight_slices import weight_table
        from aligner.resharding.publisher import Publisher
        from aligner.resharding.transfer_plan import plan_resharding
        from aligner.resharding.transport import Link
        from aligner.schema import EngineConfig, ParallelConfig
        from benchmarks.models import shape_of

        world, shape = initialize_single_process(seed=1), shape_of(model)
        settings = EngineConfig(precision=precision, update="in_place")
        engine = EmbeddedEngine(shape, settings, rank=0, seed=1, device=device)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        weights = {
            spec.name: torch.randn(spec.shape, device=device, dtype=dtype)
            for spec in weight_table(shape)
        }
        plan = plan_resharding(
            shape, ParallelConfig(), engine.weight_format.layout, itemsize=dtype.itemsize
        )
        link = Link.from_default_group(
            plan.labels, timeout=timedelta(seconds=60), device=world.device
        )
        self._bytes, self._version = sum(tensor.nbytes for tensor in weights.values()), 0
        self._publisher = Publisher(
            plan,
            link,
            read=weights.__getitem__,
            begin_update=engine.begin_update,
            dtype=dtype,
            bucket_bytes=settings.bucket_mib << 20,
            held_weights=None,
            verify="never",
        )

    def publish(self) -> float:
        """Sync the weights once, and return the rate in GB/s."""
        self._version += 1
        _wait_for_device()
        begin = time.perf_counter()
        self._publisher.publish(self._version)
        _wait_for_device()
        return self._bytes / 1e9 / (time.perf_counter() - begin)


class Peer:
    """A plain training step: padded batch, attention mask, fp32, SDPA, torch's fused AdamW."""

    def __init__(self, directory: str, way: Way, micro_batch_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._micro_batch_tokens = micro_batch_tokens
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model.config.use_cache = False
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=ADAM["learning_rate"],
            betas=(ADAM["beta1"], ADAM["beta2"]),
            eps=ADAM["epsilon"],
            weight_decay=0.0,
            fused=True,
        )

    def step(self, lengths: Sequence[int]) -> float:
        import torch

        experience = make_experience(lengths, self._model.config.vocab_size)
        rows = max(1, self._micro_batch_tokens // experience.tokens.shape[1])
        begin = time.perf_counter()
        denominator = float(experience.mask.sum())
        for part in torch.arange(len(lengths)).split(rows):
            self._micro_step(experience.select(part), denominator)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - begin

    def _micro_step(self, rows: Experience, denominator: float) -> None:
        import torch
        import torch.nn.functional as F

        from aligner.proof.reference import compute_loss

        attention = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
        logits = self._model(rows.tokens, attention_mask=attention.long()).logits
        # The last column has no target. Ignore it, because cutting it off would copy the logits.
        targets = F.pad(torch.where(rows.mask, rows.tokens[:, 1:], -100), (0, 1), value=-100)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        compute_loss(
            -losses.view(targets.shape)[:, :-1],
            torch.zeros_like(targets[:, :-1]),
            rows,
            denominator,
        )[0].backward()


class LogprobPass:
    """Forward and backward passes between hidden states and log-probs, to measure their memory."""

    def __init__(self, directory: str, way: Way, micro_batch_tokens: int) -> None:
        import torch

        from aligner.data.model_directory import read_shape

        shape = read_shape(Path(directory))
        self._hidden = torch.randn(micro_batch_tokens, shape.hidden_size, requires_grad=True)
        self._weight = (0.02 * torch.randn(shape.vocab_size, shape.hidden_size)).requires_grad_()
        self._targets = torch.randint(0, shape.vocab_size, (micro_batch_tokens,))

    def chunked(self, chunk_tokens: int) -> float:
        """Return the memory in MiB of aligner's computation, with gradients and without its
        inputs."""
        from aligner.megatron.logprobs import vocab_parallel_logprobs

        return self._peak(
            lambda: vocab_parallel_logprobs(
                self._hidden,
                self._weight,
                self._targets,
                temperature=1.0,
                chunk_tokens=chunk_tokens,
                with_entropy=True,
            )[0]
        )

    def dense(self) -> float:
        """Return the memory in MiB of logits, log_softmax and gather, without the entropy."""
        import torch.nn.functional as F

        return self._peak(
            lambda: (
                F.linear(self._hidden, self._weight)
                .log_softmax(-1)
                .gather(-1, self._targets[:, None])[:, 0]
            )
        )

    def _peak(self, logprobs: Callable[[], Tensor]) -> float:
        self._hidden.grad = self._weight.grad = None
        before = _memory_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        logprobs().sum().backward()
        return _memory_mib("VmHWM") - before


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _memory_mib(key: str) -> float:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) / 1024
