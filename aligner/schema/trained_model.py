"""Keys of a model in Megatron that several roles share: layout, optimizer and memory."""

from dataclasses import dataclass

from aligner.schema.options import option, section


@dataclass
class ParallelConfig:
    """Parallel layout in Megatron; the number of ranks is `tensor` × `pipeline` × `data` ×
    `context`."""

    tensor: int = option(1, "Tensor-parallel size (TP).", minimum=1)
    sequence: bool = option(
        False,
        "Whether to use sequence parallelism, which splits the tokens of norms and residuals"
        " over the TP ranks. Requires `tensor` above 1.",
    )
    pipeline: int = option(1, "Pipeline-parallel size (PP).", minimum=1)
    virtual_pipeline: int = option(
        1,
        "Number of model chunks per pipeline stage (interleaved schedule); 1 means the plain"
        " 1F1B schedule.",
        minimum=1,
    )
    stage_layers: list[int] | None = option(
        None,
        "Number of decoder layers of each pipeline stage, such as `[16, 16, 15, 14]`. With"
        " `virtual_pipeline`, of each chunk in the order of the layers: the first chunks of all"
        " stages come first. Null: equal numbers if possible; otherwise the stages have about equal"
        " times, including the head of the last stage.",
        read_if=".pipeline>1",
    )
    last_stage_layers: int | None = option(
        None,
        "Number of decoder layers of the last pipeline stage, which also computes the head. The"
        " remaining layers are distributed over the other stages as evenly as possible. Null"
        " means `stage_layers`.",
        minimum=1,
        read_if=".pipeline>1",
    )
    data: int = option(1, "Data-parallel size (DP).", minimum=1)
    context: int = option(
        1, "Context-parallel size (CP): each rank processes 1/CP of every sequence.", minimum=1
    )
    expert: int = option(
        1,
        "Expert-parallel size (EP): the experts are distributed over the tensor-, context- and"
        " data-parallel ranks.",
        minimum=1,
    )
    expert_tensor: int | None = option(
        None, "Tensor-parallel size of each expert; null means the value of `tensor`.", minimum=1
    )

    @property
    def ranks(self) -> int:
        """Number of processes in the role."""
        # Expert parallelism divides these ranks in another way and adds none.
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
        "`adam`: AdamW for all weights; `muon`: Muon for the matrices of the layers, and AdamW"
        " for embeddings, heads, norms and biases.",
        choices=("adam", "muon"),
    )
    learning_rate: float = option(1e-5, "Peak learning rate.", minimum=0)
    min_learning_rate: float = option(
        0.0, "Learning rate at the end of the decay.", minimum=0, read_if=".schedule=linear|cosine"
    )
    schedule: str = option(
        "linear",
        "Learning-rate decay over the run. `linear`: linear decay; `cosine`: cosine decay;"
        " `constant`: no decay.",
        choices=("linear", "cosine", "constant"),
    )
    warmup_steps: int = option(0, "Number of optimizer steps of linear warm-up.", minimum=0)
    beta1: float = option(0.9, "Adam's decay rate of the first moment.", minimum=0, below=1)
    beta2: float = option(0.95, "Adam's decay rate of the second moment.", minimum=0, below=1)
    epsilon: float = option(1e-8, "Adam's epsilon.", minimum=0)
    epsilon_placement: str = option(
        "pytorch",
        "Placement of Adam's epsilon. `pytorch`: added to the square root of the bias-corrected"
        " second moment; `tensorflow`: added to the square root of the uncorrected second"
        " moment, which makes the first steps smaller.",
        choices=("pytorch", "tensorflow"),
    )
    momentum: float = option(
        0.95, "Muon's (Nesterov) momentum.", minimum=0, below=1, read_if=".kind=muon"
    )
    newton_schulz_steps: int = option(
        5,
        "Number of Newton-Schulz iterations for the orthogonalization of Muon's updates, in the"
        " precision of the layers.",
        minimum=1,
        maximum=20,
        read_if=".kind=muon",
    )
    update_rms: float = option(
        0.2,
        "Root mean square of Muon's update of a matrix, relative to the learning rate. With"
        " 0.2, updates are about as large as AdamW's updates, so you can use AdamW's learning"
        " rates and weight decay.",
        above=0,
        read_if=".kind=muon",
    )
    weight_decay: float = option(0.0, "Decoupled weight decay.", minimum=0)
    clip_grad_norm: float = option(
        1.0,
        "Maximum global norm of the gradients. Gradients with a larger norm are scaled down to"
        " the maximum. 0 means no clipping.",
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
        "Fraction of the optimizer state that is stored and updated in host memory. Requires"
        " GPUs and `distributed`.",
        minimum=0,
        maximum=1,
    )
    max_skipped_steps: int = option(
        3,
        "Maximum number of consecutive updates that are skipped because of NaN or infinite"
        " gradients. The run fails when this number is reached.",
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
        "Granularity of fp8 scaling factors. `tensorwise`: one factor per tensor; `blockwise`:"
        " one factor per 128 elements or per 128x128 block (Hopper, CUDA 12.9); `mxfp8`: one"
        " factor per 32 elements (Blackwell).",
        choices=("tensorwise", "blockwise", "mxfp8"),
        read_if=".precision=fp8",
    )


@dataclass
class TrainedModelConfig(MegatronModelConfig):
    """Trained model in Megatron."""

    optimizer: OptimizerConfig = section(OptimizerConfig)
    recompute: str = option(
        "none",
        "Activations that are recomputed in the backward pass. `none`: no activations;"
        " `selective`: activations of the attention core; `full`: all activations of a layer.",
        choices=("none", "selective", "full"),
    )
    frozen: list[str] = option(
        [],
        "Weights that are not trained, as patterns of Hugging Face weight names, such as"
        " `model.layers.[0-7].*`.",
    )
