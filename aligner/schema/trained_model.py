"""A model in Megatron: its layout and how it is trained, for every role that has one."""

from dataclasses import dataclass

from aligner.schema.options import option, section


@dataclass
class ParallelConfig:
    """A Megatron layout; the role's ranks are tensor x pipeline x data x context."""

    tensor: int = option(1, "tensor-parallel size (TP)", minimum=1)
    sequence: bool = option(
        False, "sequence parallelism: norms and residuals hold 1/TP of the tokens; needs tensor > 1"
    )
    pipeline: int = option(1, "pipeline-parallel size (PP)", minimum=1)
    virtual_pipeline: int = option(
        1, "model chunks a pipeline stage (interleaved schedule); 1: plain 1F1B", minimum=1
    )
    last_stage_layers: int | None = option(
        None,
        "decoder layers on the last pipeline stage, which also computes the head; the other stages"
        " share the rest evenly, and all do when null",
        minimum=1,
        read=".pipeline>1",
    )
    data: int = option(1, "data-parallel size (DP)", minimum=1)
    context: int = option(
        1, "context-parallel size (CP): each rank holds 1/CP of every sequence", minimum=1
    )
    expert: int = option(
        1,
        "expert-parallel size (EP): cuts the experts over the tensor, context and data ranks",
        minimum=1,
    )
    expert_tensor: int | None = option(
        None, "tensor-parallel size inside an expert; that of the layout when null", minimum=1
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
    """AdamW through megatron-core, or Muon for the layers' matrices beside it."""

    kind: str = option(
        "adam",
        "adam: AdamW for all weights; muon: Muon for the layers' matrices, AdamW for embeddings,"
        " heads, norms and biases",
        choices=("adam", "muon"),
    )
    learning_rate: float = option(1e-5, "peak learning rate", minimum=0)
    min_learning_rate: float = option(
        0.0, "where the decay ends", minimum=0, read=".schedule=linear|cosine"
    )
    schedule: str = option(
        "linear",
        "learning-rate decay over the run, or none",
        choices=("linear", "cosine", "constant"),
    )
    warmup_steps: int = option(0, "optimizer steps of linear warm-up", minimum=0)
    beta1: float = option(0.9, "Adam's first-moment decay", minimum=0, below=1)
    beta2: float = option(0.95, "Adam's second-moment decay", minimum=0, below=1)
    epsilon: float = option(1e-8, "Adam's epsilon", minimum=0)
    epsilon_placement: str = option(
        "pytorch",
        "pytorch: added to the bias-corrected root of the second moment; tensorflow: to the"
        " uncorrected one, which damps the first steps",
        choices=("pytorch", "tensorflow"),
    )
    momentum: float = option(
        0.95, "Muon's decay of the momentum, Nesterov's", minimum=0, below=1, read=".kind=muon"
    )
    newton_schulz_steps: int = option(
        5,
        "steps by which Muon orthogonalizes, in the layers' precision",
        minimum=1,
        maximum=20,
        read=".kind=muon",
    )
    update_rms: float = option(
        0.2,
        "root mean square of Muon's update of a matrix, times the learning rate; 0.2 is about"
        " AdamW's, whose learning rates and weight decay then fit",
        above=0,
        read=".kind=muon",
    )
    weight_decay: float = option(0.0, "decoupled weight decay", minimum=0)
    clip_grad_norm: float = option(
        1.0, "gradients are scaled down to this global norm; 0 turns clipping off", minimum=0
    )
    distributed: bool = option(False, "cut optimizer state over the data-parallel ranks (ZeRO-1)")
    overlap_grad_reduce: bool = option(
        False,
        "add gradients up over the data-parallel ranks while the backward pass goes on; gains where"
        " nodes are many",
    )
    overlap_param_gather: bool = option(
        False,
        "gather updated weights while the next forward pass begins; needs distributed and"
        " overlap_grad_reduce",
    )
    offload_fraction: float = option(
        0.0,
        "share of the optimizer state kept and updated in host memory; GPUs only, needs"
        " distributed",
        minimum=0,
        maximum=1,
    )
    max_skipped_steps: int = option(
        3,
        "an update with NaN or infinite gradients is skipped; so many in a row end the run",
        minimum=1,
    )


@dataclass
class MegatronModelConfig:
    """How a model runs in Megatron."""

    parallel: ParallelConfig = section(ParallelConfig)
    micro_batch_tokens: int = option(2048, "token budget of a packed micro-batch", minimum=1)
    precision: str = option(
        "auto",
        "arithmetic of the layers; auto: bf16 on GPUs, fp32 on CPUs; fp8: bf16 with"
        " transformer-engine's fp8 products; training always keeps fp32 main weights",
        choices=("auto", "fp32", "bf16", "fp8"),
    )
    fp8_recipe: str = option(
        "tensorwise",
        "what a scale of fp8 numbers is for; tensorwise: a tensor; blockwise: 128 numbers, or"
        " squares of them (Hopper, CUDA 12.9); mxfp8: 32 numbers (Blackwell)",
        choices=("tensorwise", "blockwise", "mxfp8"),
        read=".precision=fp8",
    )


@dataclass
class TrainedModelConfig(MegatronModelConfig):
    """How a model trains in Megatron."""

    optimizer: OptimizerConfig = section(OptimizerConfig)
    recompute: str = option(
        "none",
        "activations recomputed in the backward pass; selective: of the attention core; full: of"
        " whole layers",
        choices=("none", "selective", "full"),
    )
    frozen: list[str] = option(
        [],
        "weights that are not trained: patterns over Hugging Face names, such as"
        " model.layers.[0-7].*",
    )
