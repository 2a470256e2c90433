"""The schema of every file under `conf/`: names, types, defaults, bounds and meaning.

Every key a user may write is a field here; a field's metadata holds its help text and, where it has them, the allowed
`choices` or the smallest allowed value (`minimum`). `checks.py` enforces both, and `docs/configuration.md` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, help: str, *, choices: tuple[str, ...] = (), minimum: float | None = None) -> Any:
    """A field with its default, its help text and its bounds."""
    metadata = {"help": help, "choices": choices, "minimum": minimum}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type) -> Any:
    """A nested group of keys."""
    return field(default_factory=kind)


@dataclass
class Parallel:
    """A Megatron layout; the role's ranks are tensor x pipeline x data x context."""

    tensor: int = option(1, "tensor-parallel size (TP)", minimum=1)
    sequence: bool = option(False, "sequence parallelism: norms and residuals hold 1/TP of the tokens; needs tensor > 1")
    pipeline: int = option(1, "pipeline-parallel size (PP)", minimum=1)
    virtual_pipeline: int = option(1, "model chunks a pipeline stage (interleaved schedule); 1: plain 1F1B", minimum=1)
    last_stage_layers: int | None = option(
        None,
        "decoder layers on the last pipeline stage, which also computes the head; the other stages share the rest evenly,"
        " and all do when null; of no account with one stage",
        minimum=1,
    )
    data: int = option(1, "data-parallel size (DP)", minimum=1)
    context: int = option(1, "context-parallel size (CP): each rank holds 1/CP of every sequence", minimum=1)
    expert: int = option(1, "expert-parallel size (EP): cuts the experts over the tensor, context and data ranks", minimum=1)
    expert_tensor: int | None = option(None, "tensor-parallel size inside an expert; that of the layout when null", minimum=1)

    @property
    def ranks(self) -> int:
        """Number of processes in the role."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def expert_tensor_size(self) -> int:
        """Tensor-parallel size inside an expert."""
        return self.expert_tensor or self.tensor


@dataclass
class EngineParallel:
    """The generation engine's own layout."""

    tensor: int = option(1, "tensor-parallel size of the engine (TP')", minimum=1)
    data: int = option(1, "engine replicas (DP'); 0: as many as fill the trainer's ranks", minimum=0)

    @property
    def ranks(self) -> int:
        """Number of processes that the engine spans."""
        return self.tensor * self.data


@dataclass
class Optimizer:
    """Adam through megatron-core."""

    learning_rate: float = option(1e-5, "peak learning rate", minimum=0)
    min_learning_rate: float = option(0.0, "where the decay ends", minimum=0)
    schedule: str = option("linear", "learning-rate decay over the run, or none", choices=("linear", "cosine", "constant"))
    warmup_steps: int = option(0, "optimizer steps of linear warm-up", minimum=0)
    beta1: float = option(0.9, "Adam's first-moment decay", minimum=0)
    beta2: float = option(0.95, "Adam's second-moment decay", minimum=0)
    epsilon: float = option(1e-8, "Adam's epsilon", minimum=0)
    epsilon_placement: str = option(
        "pytorch",
        "pytorch: added to the bias-corrected root of the second moment; tensorflow: to the uncorrected one, which damps"
        " the first steps",
        choices=("pytorch", "tensorflow"),
    )
    weight_decay: float = option(0.0, "decoupled weight decay", minimum=0)
    clip_grad_norm: float = option(1.0, "gradients are scaled down to this global norm; 0 turns clipping off", minimum=0)
    distributed: bool = option(False, "cut optimizer state over the data-parallel ranks (ZeRO-1)")
    offload_fraction: float = option(
        0.0, "share of the optimizer state kept and updated in host memory; GPUs only, needs distributed", minimum=0
    )
    max_skipped_steps: int = option(
        3, "an update with NaN or infinite gradients is skipped; so many in a row end the run", minimum=1
    )


@dataclass
class MegatronModel:
    """How a model runs in Megatron."""

    parallel: Parallel = section(Parallel)
    micro_batch_tokens: int = option(2048, "token budget of a packed micro-batch", minimum=1)
    precision: str = option(
        "auto",
        "arithmetic of the layers; auto: bf16 on GPUs, fp32 on CPUs; training always keeps fp32 main weights",
        choices=("auto", "fp32", "bf16"),
    )


@dataclass
class TrainedModel(MegatronModel):
    """How a model trains in Megatron."""

    optimizer: Optimizer = section(Optimizer)
    recompute: str = option(
        "none",
        "activations recomputed in the backward pass; selective: of the attention core; full: of whole layers",
        choices=("none", "selective", "full"),
    )
    frozen: list[str] = option(
        [], "weights that are not trained: patterns over Hugging Face names, such as model.layers.[0-7].*"
    )


@dataclass
class Lora:
    """Low-rank adapters (Hu et al. 2021) instead of training the weights themselves."""

    rank: int = option(0, "rank of the adapters; 0: none, the weights themselves are trained", minimum=0)
    alpha: float = option(32.0, "an adapter's product is scaled by alpha / rank", minimum=0)
    targets: list[str] = option(["attention", "mlp"], "which linear layers have adapters: attention, mlp")


@dataclass
class Run:
    """What the run is called, where it writes, how long it goes on."""

    experiment: str = option("", "set from the command line's experiment=NAME")
    name: str | None = option(None, "run name; the experiment's name and the time when null")
    dir: str | None = option(None, "run directory; runs/<run.name> when null")
    steps: int = option(1, "training steps", minimum=1)
    stop_after: int | None = option(None, "stop early after this step, with a checkpoint, as a preempted run would", minimum=1)
    resume: bool = option(False, "continue from the last checkpoint in an existing run directory")
    inputs: dict[str, Any] = option({}, "set at launch: the paths that were given as experiment:NAME, with what was given")


@dataclass
class Model:
    """Where the policy's initial weights and tokenizer come from."""

    source: str = option(
        "directory",
        "directory: a Hugging Face model directory; gguf: a GGUF file shipped by a Python package, converted once and"
        " cached; random: initialised from the seed",
        choices=("directory", "gguf", "random"),
    )
    path: str | None = option(None, "model directory (source=directory)")
    package: str | None = option(None, "importable package that ships the GGUF file (source=gguf)")
    config: dict[str, Any] = option({}, "Hugging Face config.json as YAML (source=random)")
    initializer_std: float = option(0.02, "standard deviation of the random weights (source=random)", minimum=0)


@dataclass
class Data:
    """What is learned from: prompts (trainer=online), demonstrations (sft), preferences (dpo, reward_model) or steps."""

    path: str | None = option(
        None,
        "a .jsonl file, a directory that Hugging Face datasets saved, for prompts a .txt file with one a line, or"
        " function:MODULE:CALLABLE, a Python function that yields records",
    )
    sources: dict[str, Any] = option(
        {}, "name to path, weight and fields: several sources instead of data.path, mixed by weight"
    )
    prompts: list[str] = option([], "prompts given in place, instead of a file")
    fields: dict[str, Any] = option(
        {}, "our name of a record's field to the data's own, such as {prompt: question}; for sources that have no fields"
    )
    skip_bad_records: bool = option(False, "leave out records that are not as they must be, and say how many")
    prompt_after: str | None = option(None, "a prompt begins behind the first occurrence of this text; null: at its beginning")
    prompt_before: str | None = option(None, "a prompt ends before the last occurrence of this text; null: at its end")
    max_prompt_tokens: int = option(64, "a longer prompt is an error", minimum=1)
    max_response_tokens: int = option(
        64, "a longer response, its end-of-sequence token included, is an error; for trainers other than online", minimum=2
    )
    end_of_sequence: bool = option(
        True,
        "an end-of-sequence token is put behind each response; false for a reward model that scores responses which"
        " generation cuts (trainers other than online)",
    )
    shuffle: bool = option(True, "a new order of each source's records in every pass")
    batch_size: int = option(32, "rows of a training step (trainers other than online)", minimum=1)
    held_out: int = option(
        0, "the last so many rows of each source are evaluated on and never trained on (trainers other than online)", minimum=0
    )
    normalization: str | None = option(
        None,
        "samples of the initial policy, with a prompt and a response each, that a reward model's rewards are normalized by;"
        " the preferences' own answers when null (trainer=reward_model)",
    )
    normalization_samples: int = option(256, "the first so many of these", minimum=2)


@dataclass
class Rollout:
    """How many samples a step takes, and how they are drawn."""

    prompts_per_step: int = option(8, "prompts a training step", minimum=1)
    samples_per_prompt: int = option(8, "samples a prompt", minimum=1)
    micro_batches: int = option(2, "generation is cut into so many parts, each scored while the next is generated", minimum=1)
    max_staleness: int = option(
        0,
        "samples are drawn by weights so many versions older, while the steps before theirs train; 0: by the newest, in turn",
        minimum=0,
    )
    max_skipped_prompts: int = option(
        8,
        "a step leaves out so many prompts at most that can not be drawn or scored, also not alone; 0: the first ends the run",
        minimum=0,
    )
    spare_prompts: int = option(
        0,
        "so many prompts more than a step takes are under way; those that are not complete by then go on with the next step's",
        minimum=0,
    )
    max_deferrals: int = option(
        1, "a prompt is left behind by so many steps at most, and then waited for (spare_prompts above 0)", minimum=1
    )
    max_response_tokens: int = option(16, "longest response, in tokens", minimum=1)
    min_response_tokens: int = option(0, "no end-of-sequence token is drawn before so many tokens", minimum=0)
    temperature: float = option(1.0, "sampling temperature; log-probs are taken at it everywhere", minimum=1e-3)
    top_k: int = option(0, "draw among the k most probable tokens; 0: among all, which is what the losses assume", minimum=0)
    top_p: float = option(
        1.0, "draw among the fewest tokens whose probabilities reach this; below 1 the losses' ratios are biased", minimum=0
    )
    stop_at_eos: bool = option(True, "a response ends at an end-of-sequence token")
    truncate_token: str | None = option(
        None, 'a response is cut behind this token, such as ".", before it is scored; one without it has no end; null: none is'
    )
    truncate_after: int = option(16, "response tokens in which truncate_token does not count yet", minimum=0)

    @property
    def steps_ahead(self) -> int:
        """A batch is begun when weights so many versions older serve than those which its step trains.

        A prompt that is left behind grows older by a version each time, and is at most `max_staleness` old in the end.
        """
        return self.max_staleness - (self.max_deferrals if self.spare_prompts else 0)


@dataclass
class Actor(TrainedModel):
    """The policy, and the reference beside it, in Megatron."""

    logprob_chunk_tokens: int = option(
        1024, "logits exist for so many tokens at a time; more than a micro-batch's tokens costs no recomputation", minimum=1
    )
    lora: Lora = section(Lora)


@dataclass
class Ports:
    """Listening ports of a server role; 0 takes a free one."""

    http: int = option(0, "HTTP port", minimum=0)
    grpc: int = option(0, "gRPC port", minimum=0)
    metrics: int = option(0, "Prometheus metrics port", minimum=0)


@dataclass
class Critic(TrainedModel):
    """The value model, a server on its own devices."""

    num_layers: int | None = option(
        None,
        "build the critic, or the reward model that is trained, from the model's first layers; all of them when null",
        minimum=1,
    )
    with_reward: bool = option(
        False,
        "serve the reward from the critic's processes too: no reward role, and where both are models each waits in host"
        " memory while the other works",
    )
    ports: Ports = section(Ports)


@dataclass
class Reward(MegatronModel):
    """What scores the samples; the Megatron keys speak of a reward model (kind=model). Several sources are `sources`."""

    kind: str = option(
        "function",
        "function: a Python function; model: a Megatron reward model; remote: an HTTP scorer; combined: the weighted sum of"
        " `sources`",
        choices=("function", "model", "remote", "combined"),
    )
    function: str = option("digit_fraction", "a built-in scorer's name, or module:callable (kind=function)")
    path: str | None = option(None, "reward model directory (kind=model)")
    url: str | None = option(None, "address that takes queries and answers rewards, as OpenRLHF's remote_rm_url (kind=remote)")
    timeout_s: float = option(60.0, "deadline of a request to the remote scorer, retries included (kind=remote)", minimum=0.1)
    gain: float = option(1.0, "scores are multiplied by it: normalization to a mean and deviation is gain and bias")
    bias: float = option(0.0, "and this is added")
    sources: dict[str, Any] = option(
        {}, "name to kind, weight, gain, bias and function, path, or url and timeout_s (kind=combined)"
    )
    missing_end_score: float | None = option(
        None, "score of a response without an end, an end-of-sequence token or rollout.truncate_token; its own when null"
    )
    replicas: int = option(1, "servers with the same scorer; a request goes to the one with the fewest under way", minimum=1)
    ports: Ports = section(Ports)


@dataclass
class TensorRTLLM:
    """What only TensorRT-LLM needs to know (engine.kind=tensorrt_llm)."""

    free_memory_fraction: float = option(
        0.4, "share of a GPU's free memory that is taken for keys and values when engine.kv_cache_mib is null", minimum=0.01
    )
    max_num_tokens: int = option(8192, "tokens of one step over all sequences; longer prompts are cut into chunks", minimum=1)
    timeout_s: float = option(
        900.0, "starting, giving memory back, or no response gaining a token may take so long before the run fails", minimum=1
    )


@dataclass
class Engine:
    """Generation."""

    kind: str = option(
        "embedded",
        "generation backend; embedded: a decoder in PyTorch, anywhere; tensorrt_llm: TensorRT-LLM, on GPUs",
        choices=("embedded", "tensorrt_llm"),
    )
    placement: str = option(
        "colocated",
        "where the engine runs; colocated: on the trainer's ranks; server: on devices of its own, as the role generator",
        choices=("colocated", "server"),
    )
    parallel: EngineParallel = section(EngineParallel)
    ports: Ports = section(Ports)
    precision: str = option("auto", "arithmetic; auto: bf16 on GPUs, fp32 on CPUs", choices=("auto", "fp32", "bf16"))
    batch_size: int = option(64, "sequences that one engine rank decodes at a time, at most", minimum=1)
    kv_cache_mib: int | None = option(
        None, "memory of a rank for keys and values; fewer sequences fit when it is short; no limit when null", minimum=1
    )
    cuda_graphs: bool = option(True, "replay decoding steps as CUDA graphs (GPUs only)")
    sleep: bool = option(False, "free the engine's device memory while the policy trains")
    update: str = option(
        "atomic",
        "atomic: new weights arrive beside the old ones, which serve until all are there; in_place: they overwrite the old"
        " ones, and an update that fails leaves none; shared: in place, and where the layouts agree the engine uses the"
        " trainer's tensors themselves",
        choices=("atomic", "in_place", "shared"),
    )
    in_flight: str = option(
        "finish",
        "what new weights do to responses under way (placement=server); finish: wait for them; interrupt: have them go on from"
        " the tokens that they have, under the new weights",
        choices=("finish", "interrupt"),
    )
    update_timeout_s: float = option(300.0, "an update that takes longer names the missing rank and fails", minimum=1)
    verify_every: int = option(
        0, "weights are checked by checksum at the first publish and at every N-th after it; 0: the first only", minimum=0
    )
    bucket_mib: int = option(64, "weights move between ranks in buckets of this size", minimum=1)
    tensorrt_llm: TensorRTLLM = section(TensorRTLLM)


@dataclass
class Preference:
    """The preference loss, of pairs from a file (trainer=dpo) or of the policy's own samples (loss=dpo)."""

    kind: str = option(
        "sigmoid", "sigmoid: DPO (Rafailov et al. 2023); ipo: squared (Azar et al. 2023)", choices=("sigmoid", "ipo")
    )
    beta: float = option(0.1, "weight of staying near the reference", minimum=1e-6)
    label_smoothing: float = option(
        0.0, "probability that a pair's label is wrong: conservative DPO (kind=sigmoid)", minimum=0
    )


@dataclass
class Algorithm:
    """What is learned from: an online algorithm is an advantage estimator, a loss and where the KL penalty goes."""

    name: str = option("ppo", "what this composition is called")
    trainer: str = option(
        "online",
        "online: the policy learns from its own samples; sft: from demonstrations; dpo: from preferences; reward_model: a"
        " reward model from preferences or step labels; preferences: nothing learns, the best and the worst of a prompt's"
        " samples become preferences",
        choices=("online", "sft", "dpo", "reward_model", "preferences"),
    )
    epochs: int = option(1, "passes over a step's samples (trainer=online)", minimum=1)
    minibatches: int = option(1, "optimizer steps a pass (trainer=online)", minimum=1)
    train_on: str = option(
        "all",
        "which of a prompt's samples are learned from: all, the one with the best score, or the best and the worst; with the"
        " latter two a prompt whose scores are all equal is left out",
        choices=("all", "best", "best_and_worst"),
    )
    advantage: str = option(
        "gae",
        "gae: generalized advantage estimation, with a critic; reinforce: the return; reinforce_plus_plus: the return,"
        " whitened over the step; rloo, grpo, dr_grpo: the score against those of the prompt's other samples; none: for a"
        " loss that takes no advantages",
        choices=("gae", "reinforce", "reinforce_plus_plus", "rloo", "grpo", "dr_grpo", "none"),
    )
    loss: str = option(
        "clip",
        "clip: PPO's clipped surrogate; cispo: clipped weights without a gradient; reinforce: the policy gradient, samples"
        " taken as the policy's own; copg: contrastive policy gradient over a prompt's samples; dpo: preference of the best"
        " over the worst; cross_entropy: imitation",
        choices=("clip", "cispo", "reinforce", "copg", "dpo", "cross_entropy"),
    )
    ratio_level: str = option(
        "token",
        "the policy's ratio is each token's own (token), the geometric mean of the response's (sequence), or their product"
        " (sequence_product)",
        choices=("token", "sequence", "sequence_product"),
    )
    aggregation: str = option(
        "token",
        "the loss is the mean over all response tokens (token), the mean of the responses' means (sequence), or the sum"
        " of each response's tokens, divided by the responses (sum) or by these times rollout.max_response_tokens (constant)",
        choices=("token", "sequence", "sum", "constant"),
    )
    gamma: float = option(1.0, "discount", minimum=0)
    lam: float = option(0.95, "GAE's lambda", minimum=0)
    clip_low: float = option(0.2, "policy ratio's lower clip, 1 - clip_low", minimum=0)
    clip_high: float = option(0.2, "policy ratio's upper clip, 1 + clip_high", minimum=0)
    dual_clip: float | None = option(
        None, "where the advantage is negative the loss is at most this times it; no bound when null", minimum=1
    )
    truncated_importance: str = option(
        "none",
        "correct for the engine's probabilities differing from the trainer's: weigh each token's loss by the trainer's"
        " probability over the engine's, of the token or of the whole response, truncated; none: take them as equal",
        choices=("none", "token", "sequence"),
    )
    truncated_importance_cap: float = option(2.0, "largest weight (truncated_importance)", minimum=1)
    above_importance_cap: str = option(
        "truncate",
        "what has a larger weight keeps the largest, or is dropped from the loss (truncated_importance)",
        choices=("truncate", "drop"),
    )
    value_clip: float = option(0.2, "values are clipped to the old ones plus or minus this", minimum=0)
    critic_warmup_steps: int = option(0, "steps in which the critic learns and the policy does not yet", minimum=0)
    whiten_rewards: bool = option(False, "scale the step's rewards to variance 1, mean kept")
    whiten_advantages: bool = option(True, "scale the advantages to mean 0 and variance 1")
    whiten_over: str = option(
        "step", "which tokens these are of: all of the step, or those of a prompt's samples", choices=("step", "prompt")
    )
    kl_placement: str = option(
        "reward", "where the KL penalty goes: into each token's reward, or into the loss", choices=("reward", "loss")
    )
    kl_coefficient: float = option(0.05, "weight of the per-token KL penalty", minimum=0)
    kl_estimator: str = option("k1", "estimator of the KL penalty", choices=("k1", "k2", "k3"))
    kl_target: float | None = option(None, "adapt the coefficient towards this KL per sequence; fixed when null", minimum=0)
    kl_horizon: int = option(10000, "horizon of the adaptive coefficient, in samples", minimum=1)
    early_stop_kl: float | None = option(
        None, "leave out the rest of a step's updates once policy/approx_kl of one is above this; never when null", minimum=0
    )
    entropy_coefficient: float = option(0.0, "weight of the entropy bonus in the loss", minimum=0)
    overlong_fraction: float = option(
        0.0,
        "a response loses up to 1 over this last share of rollout.max_response_tokens (DAPO's overlong penalty); 0: nothing",
        minimum=0,
    )
    dynamic_sampling_rounds: int = option(
        0,
        "replace prompts whose samples all have the same score by further ones, so many times at most before the run ends;"
        " 0: keep them",
        minimum=0,
    )
    preference: Preference = section(Preference)

    @property
    def generates(self) -> bool:
        """Whether the policy is sampled from, and its samples are scored."""
        return self.trainer in ("online", "preferences")

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.trainer == "online" and self.advantage == "gae"


@dataclass
class TLS:
    """TLS of the endpoints' gRPC; HTTP, which has none in Triton, then serves this machine alone."""

    certificate: str | None = option(None, "PEM file with the servers' certificate; no TLS when null")
    key: str | None = option(None, "PEM file with its private key")
    authorities: str | None = option(None, "PEM file with the authorities that certificates are checked against")
    mutual: bool = option(False, "servers ask clients for a certificate too; the run's own show the servers'")


@dataclass
class Server:
    """What the critic and reward servers share."""

    interface: str = option("127.0.0.1", "address, or name of the network interface, that the endpoints listen on")
    guard: str = option(
        "key",
        "key: requests must carry the run's key, made at launch (access_key in the run directory); none: anyone is served",
        choices=("key", "none"),
    )
    tls: TLS = section(TLS)
    accept_unnumbered: bool = option(False, "serve critic_train requests that carry no sequence number (foreign clients)")
    start_timeout_s: float = option(180.0, "a role that is not healthy by then ends the run", minimum=1)
    request_timeout_s: float = option(
        300.0,
        "deadline of a request, its retries and a server's restart included; also of each step by which a lost critic is"
        " brought back, a restore or a replayed update",
        minimum=1,
    )
    drain_timeout_s: float = option(30.0, "a server that is told to stop finishes what it has taken for so long", minimum=0)
    max_restarts: int = option(3, "a server that dies is started again so often; 0: its end is the run's", minimum=0)
    max_batch_size: int = option(256, "largest batch of the batching endpoints", minimum=1)
    max_sequence_length: int | None = option(
        None, "longest sequence that is taken, in tokens; the model's positions when null", minimum=1
    )
    max_request_tokens: int = option(2**22, "largest request, in tokens, padding included", minimum=1)
    concurrent_requests: int = option(
        4, "requests that an inference endpoint takes at a time; those that wait together are computed together", minimum=1
    )
    batch_tokens: int = option(16384, "tokens of the requests that are computed together, at most", minimum=1)


@dataclass
class Cluster:
    """Where the roles run."""

    kind: str = option("local", "launcher", choices=("local",))
    threads_per_rank: int | None = option(None, "OpenMP threads a rank; cores over ranks when null", minimum=1)
    stop_timeout_s: float = option(10.0, "a role that has not ended by itself by then is killed", minimum=1)
    collective_timeout_s: float = option(600.0, "a collective that takes longer names the missing rank and fails", minimum=1)


@dataclass
class Checkpoint:
    """When the run can be resumed."""

    every: int = option(0, "save every N steps; 0: at the end only", minimum=0)
    keep: int = option(2, "newest checkpoints kept; older ones are deleted", minimum=1)
    best_metric: str | None = option(
        None,
        "also keep the best checkpoint by this metric, the highest value or the lowest of a loss: such as reward/mean, or"
        " eval/score among the steps that are evaluated",
    )
    asynchronous: bool = option(True, "write a checkpoint while training goes on, from a copy in host memory")


@dataclass
class Evaluation:
    """Measuring while training; all but `every` is for trainer=online, the others evaluate on data.held_out."""

    every: int = option(
        0,
        "evaluate every N steps. trainer=online: before the first step and after the last too; 0: never. The others: also"
        " where a checkpoint is taken; 0: only there",
        minimum=0,
    )
    path: str | None = option(None, "held-out prompts, in a file or directory as data.path; `reference` is a good response")
    fields: dict[str, Any] = option({}, "our name of a record's field to the file's own, as data.fields")
    prompts: list[str] = option([], "held-out prompts given in place, instead of a file")
    count: int | None = option(None, "the first so many prompts; all when null", minimum=1)
    samples: int = option(1, "responses a prompt", minimum=1)
    greedy: bool | None = option(None, "take the most probable token instead of drawing; with one response a prompt when null")
    temperature: float = option(1.0, "sampling temperature", minimum=1e-3)
    function: str | None = option(
        None, "scorer of the responses, as reward.function: a gold scorer; the run's own reward when null"
    )
    pass_threshold: float = option(1.0, "a response passes with this score or above (eval/pass@k)")


@dataclass
class Logging:
    """What is written and shown."""

    tensorboard: bool = option(True, "write TensorBoard event files")
    timeline: bool = option(True, "write what every process does when, to be seen in trace.json")
    samples_every: int = option(5, "show and store samples every N steps", minimum=1)
    samples_count: int = option(4, "samples shown", minimum=1)


@dataclass
class Config:
    """The whole configuration of a run."""

    seed: int = option(1, "the run's one seed", minimum=0)
    run: Run = section(Run)
    model: Model = section(Model)
    data: Data = section(Data)
    rollout: Rollout = section(Rollout)
    algorithm: Algorithm = section(Algorithm)
    actor: Actor = section(Actor)
    critic: Critic = section(Critic)
    reward: Reward = section(Reward)
    engine: Engine = section(Engine)
    server: Server = section(Server)
    cluster: Cluster = section(Cluster)
    checkpoint: Checkpoint = section(Checkpoint)
    evaluation: Evaluation = section(Evaluation)
    logging: Logging = section(Logging)
