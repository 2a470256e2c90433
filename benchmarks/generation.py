"""Tokens per second of the embedded engine on SmolLM2-135M's shape, beside transformers' generate and the arithmetic limit.

The limit is the measured rate of fp32 matrix products over the model's arithmetic per token. Random weights; the engine
samples, transformers samples too; both generate the same number of tokens for the same prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F

from aligner.config.model_shape import ModelShape
from aligner.config.schema import EngineParallel
from aligner.config.weights import weight_table
from aligner.data.types import Prompt
from aligner.engines.embedded.engine import EmbeddedEngine
from aligner.engines.protocol import GenerationRequest, SamplingOptions

SHAPE = ModelShape(
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    ffn_hidden_size=1536,
    vocab_size=49152,
    max_positions=8192,
    norm_epsilon=1e-5,
    rope_theta=100000.0,
    tied_embeddings=True,
    eos_token_ids=(),
    pad_token_id=0,
)


def best_seconds(function: Callable[[], object], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def matmul_flops(batch: int) -> float:
    """FLOP/s of a feed-forward matrix product at this batch, over weights too many for the cache."""
    x = torch.randn(batch, SHAPE.hidden_size)
    weights = [torch.randn(2 * SHAPE.ffn_hidden_size, SHAPE.hidden_size) for _ in range(16)]
    work = sum(2 * batch * weight.numel() for weight in weights)
    return work / best_seconds(lambda: [F.linear(x, weight) for weight in weights], 10)


def fill(engine: EmbeddedEngine) -> None:
    torch.manual_seed(0)
    for view in engine.weight_views().values():
        view.fill_(1.0) if view.dim() == 1 else view.normal_(0, 0.02)
    engine.finish_update(0)


def transformers_model(engine: EmbeddedEngine) -> torch.nn.Module:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": SHAPE.num_layers,
        "hidden_size": SHAPE.hidden_size,
        "num_attention_heads": SHAPE.num_heads,
        "num_key_value_heads": SHAPE.num_kv_heads,
        "head_dim": SHAPE.head_dim,
        "intermediate_size": SHAPE.ffn_hidden_size,
        "vocab_size": SHAPE.vocab_size,
        "max_position_embeddings": SHAPE.max_positions,
        "rms_norm_eps": SHAPE.norm_epsilon,
        "rope_theta": SHAPE.rope_theta,
        "tie_word_embeddings": True,
    }
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        tensors = {name: view.contiguous() for name, view in engine.weight_views().items()}
        save_file(tensors, Path(directory) / "model.safetensors", metadata={"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 64], help="sequences decoded at a time")
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    engine = EmbeddedEngine(SHAPE, EngineParallel(), 0, seed=1, batch_size=max(args.batch), group=None)
    fill(engine)
    model = None if args.no_transformers else transformers_model(engine)
    # Two FLOP a weight of every matrix; the embedding counts once, as the head.
    flop_per_token = 2 * sum(spec.numel for spec in weight_table(SHAPE) if len(spec.shape) == 2)
    options = SamplingOptions(max_new_tokens=args.new_tokens)
    for batch in args.batch:
        generator = torch.Generator().manual_seed(0)
        distinct = -(-batch // args.samples_per_prompt)
        prompts = [
            Prompt(index, "", torch.randint(0, SHAPE.vocab_size, (args.prompt_tokens,), generator=generator))
            for index in range(distinct)
        ]
        requests = [GenerationRequest(prompts[row % distinct], row // distinct) for row in range(batch)]
        tokens = batch * args.new_tokens

        def embedded(requests: list[GenerationRequest] = requests) -> None:
            engine.generate(requests, options)

        flops = matmul_flops(batch)
        result: dict[str, float] = {
            "batch": batch,
            "threads": args.threads,
            "matmul_gflops": flops / 1e9,
            "limit_tokens_per_s": flops / flop_per_token,
            "embedded_tokens_per_s": tokens / best_seconds(embedded, args.repeats),
        }
        if model is not None:
            inputs = torch.stack([request.prompt.tokens for request in requests])

            def generate(inputs: torch.Tensor = inputs, model: torch.nn.Module = model) -> None:
                with torch.inference_mode():
                    model.generate(
                        inputs,
                        attention_mask=torch.ones_like(inputs),
                        max_new_tokens=args.new_tokens,
                        min_new_tokens=args.new_tokens,
                        do_sample=True,
                        top_k=0,
                        pad_token_id=0,
                    )

            result["transformers_tokens_per_s"] = tokens / best_seconds(generate, 1)
        if args.json:
            print(json.dumps({"benchmark": "generation", **result}))
        else:
            print("  ".join(f"{key} {value:.4g}" for key, value in result.items()))


if __name__ == "__main__":
    main()
