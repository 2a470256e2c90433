"""A model in Megatron: its layout and how it is trained, for every role that has one."""

from dataclasses import dataclass

from aligner.schema.options import option, section


@dataclass
class ParallelConfig:
    """Parallel layout in Megatron; the number of ranks is `tensor` × `pipeline` × `data` ×
    `context`."""

    tensor: int = option(1, "Tensor-parallel size (TP).", minimum=1)
    sequence: bool = option(
        False,
        "Whether to use sequence parallelism: norms and residuals hold 1/TP of the tokens;"
        " requires `tensor` above 1.",
    )
    pipeline: int = option(1, "Pipeline-parallel size (PP).", minimum=1)
    virtual_pipeline: int = option(
        1,
        "Model chunks per pipeline stage (interleaved schedule); 1 means the plain 1F1B schedule.",
        minimum=1,
    )
    last_stage_layers: int | None = option(
        None,
        "Decoder layers of the last pipeline stage, which also computes the head; the other"
        " stages share the remaining layers evenly. Null means all stages have the same number.",
        minimum=1,
        read=".pipeline>1",
    )
    data: int = option(1, "Data-parallel size (DP).", minimum=1)
    context: int = option(
        1, "Context-parallel size (CP): each rank holds 1/CP of every sequence.", minimum=1
    )
    expert: int = option(
        1,
        "Expert-parallel size (EP): the experts are split over the tensor, context and data ranks.",
        minimum=1,
    )
    expert_tensor: int | None = option(
        None, "Tensor-parallel size of each expert; null means the value of `tensor`.", minimum=1
    )

    @property
    def ranks(self) -> int:
        """Number of processes in the role."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def expert_tensor_size(self) -> int:
        """Tensor-parallel size inside an expert."""
        return self.expert_tensor or self.tensor


@dataclass
class OptimizerConfig:
    """AdamW of megatron-core, or Muon for the matrices of the layers."""

    kind: str = option(
        "adam",
        "`adam`: AdamW for all weights; `muon`: Muon for the matrices of the layers, AdamW for"
        " embeddings, heads, norms and biases.",
        choices=("adam", "muon"),
    )
    learning_rate: float = option(1e-5, "Peak learning rate.", minimum=0)
    min_learning_rate: float = option(
        0.0, "Learning rate at the end of the decay.", minimum=0, read=".schedule=linear|cosine"
    )
    schedule: str = option(
        "linear",
        "Learning-rate decay over the run: `linear`, `cosine`, or `constant` for none.",
        choices=("linear", "cosine", "constant"),
    )
    warmup_steps: int = option(0, "Optimizer steps of linear warm-up.", minimum=0)
    beta1: float = option(0.9, "Adam's decay rate of the first moment.", minimum=0, below=1)
    beta2: float = option(0.95, "Adam's decay rate of the second moment.", minimum=0, below=1)
    epsilon: float = option(1e-8, "Adam's epsilon.", minimum=0)
    epsilon_placement: str = option(
        "pytorch",
        "`pytorch`: epsilon is added to the bias-corrected square root of the second moment;"
        " `tensorflow`: to the uncorrected one, which damps the first steps.",
        choices=("pytorch", "tensorflow"),
    )
    momentum: float = option(
        0.95, "Muon's (Nesterov) momentum.", minimum=0, below=1, read=".kind=muon"
    )
    newton_schulz_steps: int = option(
        5,
        "Newton-Schulz iterations with which Muon orthogonalizes updates, in the precision of"
        " the layers.",
        minimum=1,
        maximum=20,
        read=".kind=muon",
    )
    update_rms: float = option(
        0.2,
        "Root mean square of Muon's update of a matrix, relative to the learning rate; 0.2 is"
        " about AdamW's, so that its learning rates and weight decay can be used.",
        above=0,
        read=".kind=muon",
    )
    weight_decay: float = option(0.0, "Decoupled weight decay.", minimum=0)
    clip_grad_norm: float = option(
        1.0,
        "Maximum global norm of gradients, to which larger ones are scaled down; 0 means no"
        " clipping.",
        minimum=0,
    )
    distributed: bool = option(
        False, "Whether to shard optimizer state over the data-parallel ranks (ZeRO-1)."
    )
    overlap_grad_reduce: bool = option(
        False,
        "Whether to overlap the gradient reduction over data-parallel ranks with the backward"
        " pass; useful on many nodes.",
    )
    overlap_param_gather: bool = option(
        False,
        "Whether to overlap the all-gather of updated weights with the next forward pass;"
        " requires `distributed` and `overlap_grad_reduce`.",
    )
    offload_fraction: float = option(
        0.0,
        "Fraction of the optimizer state that is stored and updated in host memory; GPUs only,"
        " requires `distributed`.",
        minimum=0,
        maximum=1,
    )
    max_skipped_steps: int = option(
        3,
        "Number of consecutive updates with NaN or infinite gradients, each of which is skipped,"
        " after which the run fails.",
        minimum=1,
    )


@dataclass
class MegatronModelConfig:
    """Model in Megatron."""

    parallel: ParallelConfig = section(ParallelConfig)
    micro_batch_tokens: int = option(
        2048, "Maximum number of tokens of a packed micro-batch.", minimum=1
    )
    precision: str = option(
        "auto",
        "Precision of the layers. `auto`: bf16 on GPUs, fp32 on CPUs; `fp32`; `bf16`; `fp8`:"
        " bf16 with Transformer Engine's fp8 matmuls. Training always keeps fp32 main weights.",
        choices=("auto", "fp32", "bf16", "fp8"),
    )
    fp8_recipe: str = option(
        "tensorwise",
        "Granularity of fp8 scaling factors. `tensorwise`: one per tensor; `blockwise`: one per"
        " 128 elements or 128x128 block (Hopper, CUDA 12.9); `mxfp8`: one per 32 elements"
        " (Blackwell).",
        choices=("tensorwise", "blockwise", "mxfp8"),
        read=".precision=fp8",
    )


@dataclass
class TrainedModelConfig(MegatronModelConfig):
    """Trained model in Megatron."""

    optimizer: OptimizerConfig = section(OptimizerConfig)
    recompute: str = option(
        "none",
        "Activation recomputation in the backward pass. `none`; `selective`: attention core;"
        " `full`: whole layers.",
        choices=("none", "selective", "full"),
    )
    frozen: list[str] = option(
        [],
        "Weights that are not trained, as patterns of Hugging Face names, such as"
        " `model.layers.[0-7].*`.",
    )
