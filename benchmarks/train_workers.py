"""The processes that benchmarks.train compares: our trainer's ranks, and a plain transformers + torch training step.

Each lives in its own process, started with its own thread count and stopped by the `Group` that started it, and does what
it is told over a pipe.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from aligner.data.types import Experience

PROMPT_TOKENS = 8
CLIP_GRAD_NORM = 1.0
ADAM = {"learning_rate": 1e-6, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}

MODELS: dict[str, dict[str, Any]] = {
    "smollm2_135m": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Way:
    """A way to use the cores: a name, threads a process, and (for our trainer) a Megatron layout."""

    name: str
    threads: int
    layout: dict[str, int] | None = None

    @property
    def processes(self) -> int:
        layout = self.layout or {}
        return layout.get("data", 1) * layout.get("pipeline", 1)


def make_experience(lengths: Sequence[int], vocab_size: int) -> Experience:
    """Random tokens of the given lengths, a prompt before each response, and random advantages."""
    import torch

    from aligner.data.types import Experience, response_mask

    generator = torch.Generator().manual_seed(0)
    counts, width = torch.tensor(lengths), max(lengths)
    tokens = torch.randint(0, vocab_size, (len(lengths), width), generator=generator)
    mask = response_mask(counts, torch.full_like(counts, PROMPT_TOKENS), width)
    advantages = torch.randn(mask.shape, generator=generator)
    old = torch.full(mask.shape, -float(torch.tensor(float(vocab_size)).log()))
    zeros = torch.zeros(mask.shape)
    return Experience(tokens, counts, mask, old, old, old, zeros, zeros, advantages, zeros)


def _loss(logprobs: Tensor, experience: Experience, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
    from aligner.algorithms.losses import policy_loss

    return policy_loss(logprobs, experience.old_logprobs, experience.advantages, experience.mask, denominator=denominator)


class Ours:
    """One rank of our policy."""

    def __init__(self, directory: str, way: Way, micro_batch_tokens: int) -> None:
        from aligner.config.schema import Actor, Optimizer, Parallel
        from aligner.data.model_directory import read_shape
        from aligner.megatron import world as worlds
        from aligner.megatron.policy import Policy

        world = worlds.initialize(Parallel(**(way.layout or {})), seed=1, timeout_s=120)
        self._shape = read_shape(Path(directory))
        optimizer = Optimizer(**ADAM, clip_grad_norm=CLIP_GRAD_NORM)
        settings = Actor(parallel=world.layout, optimizer=optimizer, micro_batch_tokens=micro_batch_tokens)
        self._policy = Policy(self._shape, world, settings, Path(directory), 1.0, total_updates=1000)

    def step(self, lengths: Sequence[int]) -> float:
        experience = make_experience(lengths, self._shape.vocab_size)
        self._policy.world.barrier()
        begin = time.perf_counter()
        self._policy.train(experience, _loss)
        return time.perf_counter() - begin

    def products(self, lengths: Sequence[int]) -> float:
        """Seconds that the matrix products of this rank's linear layers and head take in a step, and nothing else.

        Three a weight and micro-batch: the output, and the gradients of input and weight. Attention's are not counted.
        """
        import torch

        experience = make_experience(lengths, self._shape.vocab_size)
        runner = self._policy.runner
        batches = runner.share(experience.tokens, experience.lengths)
        work: list[tuple[int, Tensor]] = []
        for batch in batches:
            scored = int(experience.mask[batch.batch_rows].sum())
            for chunk in runner.chunks:
                layers = [weight for weight in chunk.decoder.parameters() if weight.dim() == 2]
                work += [(batch.tokens.numel(), weight) for weight in layers]
                if chunk.post_process:
                    work.append((scored, chunk.output_layer.projection))
        with torch.no_grad():
            inputs = {(count, size): torch.randn(count, size) for count, weight in work for size in weight.shape}
            outputs = {key: torch.empty(key) for key in inputs} | {
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
            self._policy.world.barrier()
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin


class Peer:
    """A plain training step: padded batch, attention mask, fp32, SDPA, torch's fused AdamW."""

    def __init__(self, directory: str, way: Way, micro_batch_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._micro_batch_tokens = micro_batch_tokens
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
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

        attention = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
        logits = self._model(rows.tokens, attention_mask=attention.long()).logits
        # The last column has no target: ignored rather than cut off, which would copy the logits.
        targets = F.pad(torch.where(rows.mask, rows.tokens[:, 1:], -100), (0, 1), value=-100)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        _loss(-losses.view(targets.shape)[:, :-1], rows, denominator)[0].backward()


class LogprobPass:
    """Forward and backward passes from hidden states to log-probs and back, for their memory."""

    def __init__(self, directory: str, way: Way, micro_batch_tokens: int) -> None:
        import torch

        from aligner.data.model_directory import read_shape

        shape = read_shape(Path(directory))
        self._hidden = torch.randn(micro_batch_tokens, shape.hidden_size, requires_grad=True)
        self._weight = (0.02 * torch.randn(shape.vocab_size, shape.hidden_size)).requires_grad_()
        self._targets = torch.randint(0, shape.vocab_size, (micro_batch_tokens,))

    def chunked(self, chunk_tokens: int) -> float:
        """MiB that our pass needs beyond its inputs, gradients included."""
        from aligner.megatron.logprobs import vocab_parallel_logprobs

        return self._peak(
            lambda: vocab_parallel_logprobs(
                self._hidden, self._weight, self._targets, temperature=1.0, chunk_tokens=chunk_tokens, with_entropy=True
            )[0]
        )

    def dense(self) -> float:
        """The same for logits, log_softmax and gather, without an entropy."""
        import torch.nn.functional as F

        return self._peak(
            lambda: F.linear(self._hidden, self._weight).log_softmax(-1).gather(-1, self._targets[:, None])[:, 0]
        )

    def _peak(self, logprobs: Callable[[], Tensor]) -> float:
        self._hidden.grad = self._weight.grad = None
        before = _memory_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        logprobs().sum().backward()
        return _memory_mib("VmHWM") - before


def _memory_mib(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def write_model(directory: str, config: dict[str, Any]) -> None:
    """Write a Llama of random weights for both sides to read."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(directory)


def _serve(pipe: Any, make: Callable[[], Any], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    try:
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        worker = make()
        while (message := pipe.recv()) is not None:
            name, args = message
            pipe.send((True, getattr(worker, name)(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


class Group:
    """The processes of one way, as a context manager; they end with it."""

    def __init__(self, kind: Callable[..., Any], directory: str, way: Way, micro_batch_tokens: int) -> None:
        self.way = way
        self._make = functools.partial(kind, directory, way, micro_batch_tokens)
        self._workers: list[tuple[Any, Any]] = []

    def __enter__(self) -> Group:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        for rank in range(self.way.processes):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.way.processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(self.way.threads),
            }
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._make, environment), daemon=True)
            process.start()
            self._workers.append((process, ours))
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._workers:
            if process.is_alive():
                pipe.send(None)
            process.join(timeout=5)
            process.kill()
            process.join()

    def call(self, method: str, *args: Any) -> float:
        """The slowest process's answer."""
        for _, pipe in self._workers:
            pipe.send((method, args))
        answers = [pipe.recv() for _, pipe in self._workers]
        for good, value in answers:
            if not good:
                raise RuntimeError(value)
        return max(value for _, value in answers)
