"""Conversion from and to checkpoints of Megatron-LM in the format torch_dist.

Megatron-LM and NeMo save models in this format (`--ckpt-format torch_dist`), with
torch.distributed.checkpoint. The tensors do not depend on the parallel layout: each is a whole
parameter, as a single rank would hold it. The parameters of all layers are one tensor [L, ...] if
the layers are alike, and those of all experts of a layer are one tensor [E, ...]. A checkpoint has
no config.json and no tokenizer.

The metadata of a checkpoint is a pickle. It is read without executing code of the checkpoint: only
classes of torch's own metadata are allowed.
"""

import io
import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from aligner.data.export import EXPORT_DTYPES, Source, select_weight
from aligner.data.model_directory import TensorEntry, assemble_stored_tensors
from aligner.errors import ConfigError
from aligner.file_limits import MAX_PICKLE_BYTES, read_limited_bytes
from aligner.files import convert_write_errors, create_directory
from aligner.megatron.named_weights import select_part
from aligner.models.hugging_face import read_config
from aligner.models.model_source import directory_config
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import (
    TensorSpec,
    group_by_parameter,
    group_by_stored_tensor,
    weight_table,
)

_METADATA = ".metadata"
# transformer-engine's linear layers contain the preceding norm; checkpoints of dense models have
# its name there, with and without transformer-engine.
_NORM_NAMES = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
# Parts of a checkpoint that are not weights of the model.
_NO_WEIGHTS = re.compile(
    r"optimizer\.|chained_\d+\.|rng_state|rerun_state|opt_param_scheduler|.*_extra_state"
)
# Parameters that Megatron-LM's own models have.
_STANDARD_PARAMETER = re.compile(
    r"(embedding\.(word|position)_embeddings|decoder\.final_layernorm|output_layer"
    r"|decoder\.layers\.\d+\.(input_layernorm|pre_mlp_layernorm"
    r"|self_attention\.(linear_qkv|linear_proj|q_layernorm|k_layernorm)"
    r"|mlp\.(router|(experts\.local_experts\.\d+\.)?linear_fc[12]))"
    r")\.(weight|bias)"
)


@dataclass(frozen=True)
class _Region:
    """Position of a parameter in a checkpoint."""

    key: str
    """Name of the tensor."""
    layer: int | None = None
    """Index of the layer, the first dimension of a tensor of all layers; None for other tensors."""
    expert: int | None = None
    """Index of the expert, the next dimension of a tensor of all experts; None for other tensors.
    """

    @property
    def index(self) -> tuple[int, ...]:
        """Indices of the leading dimensions."""
        return tuple(each for each in (self.layer, self.expert) if each is not None)

    def leading_sizes(self, shape: ModelShape) -> tuple[int, ...]:
        """Return the sizes of the leading dimensions for a model."""
        sizes = () if self.layer is None else (shape.num_layers,)
        return sizes if self.expert is None else (*sizes, shape.num_experts)


class _Unpickler(pickle._Unpickler):
    """Unpickler of a checkpoint's metadata that refuses all classes but those of the metadata.

    The base class is the implementation in Python: the one in C allocates memory for any index or
    length that the file names.
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)
    # The metadata contain no bytearrays, whose memory is allocated before they are read.
    del dispatch[pickle.BYTEARRAY8[0]]

    _NAMES: Mapping[str, frozenset[str]] = {
        "torch.distributed.checkpoint.metadata": frozenset(
            (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        "torch.distributed.checkpoint.filesystem": frozenset(("_StorageInfo", "_StoragePrefix")),
        "torch.distributed.checkpoint.planner": frozenset(
            ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
        ),
        "torch": frozenset(("Size",)),
        "torch.serialization": frozenset(("_get_layout",)),
        "pathlib": frozenset(("PosixPath",)),
        "collections": frozenset(("OrderedDict",)),
        "builtins": frozenset(("set",)),
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of torch's metadata.

        Raises:
            UnpicklingError: The metadata refers to another class or function.
        """
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in self._NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"refers to {module}.{name}, which metadata does not need")

    def load_build(self) -> None:
        """Set the attributes of an object.

        Raises:
            UnpicklingError: The object is a class or a function, which other code uses too.
        """
        target = self.stack[-2]  # type: ignore[attr-defined]
        if callable(target):
            raise pickle.UnpicklingError(f"changes {target!r:.100}, which is not an object of it")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


class _Reader(FileSystemReader):
    """Reader of torch.distributed.checkpoint that does not execute code of the checkpoint."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata of the checkpoint."""
        content = read_limited_bytes(Path(self.path) / _METADATA, MAX_PICKLE_BYTES)
        metadata = _Unpickler(io.BytesIO(content)).load()
        _check_metadata(metadata)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        return metadata


def _check_metadata(metadata: Any) -> None:
    """Raise ValueError if an unpickled object is not the metadata of a checkpoint."""
    entries = getattr(metadata, "state_dict_metadata", None)
    if not isinstance(metadata, Metadata) or not isinstance(entries, dict):
        raise ValueError(f"it is an object of {type(metadata).__name__}, expected Metadata")
    for key, stored in entries.items():
        if not isinstance(key, str):
            raise ValueError(f"{key!r:.100} is not the name of a tensor")
        if isinstance(stored, TensorStorageMetadata) and not (
            isinstance(stored.size, torch.Size)
            and isinstance(stored.properties, TensorProperties)
            and isinstance(stored.properties.dtype, torch.dtype)
            and isinstance(stored.chunks, list)
        ):
            raise ValueError(f"the description of tensor {key} is not complete")
    for storage in (metadata.storage_data or {}).values():
        path = Path(storage.relative_path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{path} is not in the directory of the checkpoint")


class _RegionReader(LoadPlanner):
    """Plan to read regions of a checkpoint's tensors into tensors in memory."""

    def __init__(self, targets: Mapping[_Region, Tensor]) -> None:
        """Create a plan for regions with the tensors that receive them, without leading indices."""
        self._targets = targets
        self._tensors: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Store the metadata."""
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Return the plan to read the stored parts of all regions."""
        items: list[ReadItem] = []
        for region, target in self._targets.items():
            offsets = torch.Size((*region.index, *(0 for _ in target.shape)))
            sizes = torch.Size((*(1 for _ in region.index), *target.shape))
            self._tensors[region.key, tuple(offsets)] = target.view(sizes)
            stored = self._metadata.state_dict_metadata[region.key]
            assert isinstance(stored, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(offsets, sizes)
            items += create_read_items_for_chunk_list(region.key, stored, [chunk])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse objects that are not tensors; a region is always of a tensor."""
        raise AssertionError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the view of a target that receives a stored part."""
        offset = read_item.dest_index.offset
        assert offset is not None
        target = self._tensors[read_item.dest_index.fqn, tuple(offset)]
        for axis, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(axis, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing; the part has been copied into its target."""


class _Checkpoint:
    """The tensors of a checkpoint."""

    def __init__(self, directory: Path) -> None:
        """Read the metadata.

        Raises:
            ConfigError: The metadata cannot be read.
        """
        self.directory = directory
        self._reader = _Reader(directory)
        try:
            self._metadata = self._reader.read_metadata()
        except ConfigError:
            raise
        # A damaged pickle raises many types of errors.
        except Exception as error:
            raise ConfigError(
                f"{directory / _METADATA}: the metadata of the checkpoint cannot be read:"
                f" {type(error).__name__}: {error}"
            ) from error
        self.tensors = {
            key: stored
            for key, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        # NeMo puts the model into a module.
        embedding = next(
            (key for key in self.tensors if key.endswith("word_embeddings.weight")), ""
        )
        self.prefix = embedding.partition("embedding.")[0]

    def find(self, parameter: str) -> _Region | None:
        """Return the position of a parameter, by its name in the whole model; None without it."""
        regions = (replace(region, key=self.prefix + region.key) for region in _regions(parameter))
        return next((region for region in regions if region.key in self.tensors), None)

    def shape(self, region: _Region) -> tuple[int, ...]:
        """Return the shape of a region, without its leading indices."""
        return tuple(self.tensors[region.key].size[len(region.index) :])

    def dtype(self, region: _Region) -> torch.dtype:
        """Return the dtype of a region."""
        dtype = self.tensors[region.key].properties.dtype
        assert dtype is not None
        return dtype

    def read(self, regions: Sequence[_Region]) -> dict[_Region, Tensor]:
        """Return the content of regions.

        Raises:
            ConfigError: A file of the checkpoint is missing or damaged.
        """
        # torch raises many types of errors for a damaged file.
        try:
            targets = {
                region: torch.empty(self.shape(region), dtype=self.dtype(region))
                for region in regions
            }
            planner = _RegionReader(targets)
            planner.set_up_planner({}, self._metadata, is_coordinator=True)
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:
            raise ConfigError(
                f"{self.directory}: the checkpoint is incomplete or damaged: {error}"
            ) from error
        return targets


def _regions(parameter: str) -> Iterator[_Region]:
    """Yield the positions where checkpoints store a parameter, as a whole without prefix."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", parameter)
    if match is None:
        yield _Region(parameter)
        return
    layer, name = int(match[1]), match[2]
    names = [name]
    for plain, fused in _NORM_NAMES:
        if name.startswith(plain):
            names.append(name.replace(plain, fused))
    expert = None
    if found := re.fullmatch(r"(.+\.)local_experts\.(\d+)\.(.+)", name):
        names, expert = [f"{found[1]}experts.{found[3]}"], int(found[2])
    for each in names:
        yield _Region(f"decoder.layers.{each}", layer, expert)
        yield _Region(f"decoder.layers.{layer}.{each}", expert=expert)


def _parameter_shape(specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Return the shape of the parameter that consists of these weights."""
    shapes = [spec.shape[::-1] if spec.is_transposed else spec.shape for spec in specs]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _weight_view(parameter: Tensor, spec: TensorSpec, shape: ModelShape) -> Tensor:
    """Return the part of a parameter that is a weight, in megatron-core's orientation."""
    part = select_part(parameter, spec.part, shape)
    rows = spec.shape[::-1] if spec.is_transposed else spec.shape
    # The vocabulary may be padded.
    return part[: rows[0]] if spec.layer is None else part


def read_checkpoint(directory: Path, config_directory: Path) -> Source:
    """Return the model of a torch_dist checkpoint.

    Args:
        directory: The checkpoint, from `find_torch_dist_checkpoint`.
        config_directory: Hugging Face directory with config.json and tokenizer of the model.

    Raises:
        ConfigError: The checkpoint is damaged, or its weights are not those of config.json.
    """
    config = directory_config(config_directory, "--config")
    shape = read_config(config, f"--config={config_directory}")
    table = weight_table(shape)
    checkpoint = _Checkpoint(directory)
    regions = _find_regions(checkpoint, table, shape)

    by_name = group_by_stored_tensor(table)
    parameters = group_by_parameter(table)
    layer_parameters: dict[int | None, list[str]] = {}
    for parameter, specs in parameters.items():
        layer_parameters.setdefault(specs[0].layer, []).append(parameter)
    loaded: dict[str, Tensor] = {}

    def read_parameter(spec: TensorSpec) -> Tensor:
        # Reading the parameters of a layer together opens each file once per layer.
        if spec.parameter not in loaded:
            loaded.clear()
            names = layer_parameters[spec.layer]
            tensors = checkpoint.read([regions[name] for name in names])
            loaded.update({name: tensors[regions[name]] for name in names})
        return loaded[spec.parameter]

    def read_weight(spec: TensorSpec) -> Tensor:
        weight = _weight_view(read_parameter(spec), spec, shape)
        if spec.is_transposed:
            return weight.reshape(spec.shape[::-1]).T
        return weight.reshape(spec.shape)

    def read(name: str) -> Tensor:
        ((_, tensor),) = assemble_stored_tensors(by_name[name], read_weight)
        return tensor

    entries = (
        TensorEntry(
            name,
            checkpoint.dtype(regions[specs[0].parameter]),
            specs[0].stored_range.shape,
        )
        for name, specs in by_name.items()
    )
    return Source(config, tuple(entries), read, config_directory, "vocabulary", directory, "SOURCE")


def _find_regions(
    checkpoint: _Checkpoint, table: Sequence[TensorSpec], shape: ModelShape
) -> dict[str, _Region]:
    """Return the position of every parameter of a model.

    Raises:
        ConfigError: A parameter is missing or has another shape, or the checkpoint has further
            weights. The message names them.
    """
    problems: list[str] = []
    regions: dict[str, _Region] = {}
    for parameter, specs in group_by_parameter(table).items():
        region = checkpoint.find(parameter)
        if region is None:
            problems.append(f"{parameter} is missing")
            continue
        regions[parameter] = region
        expected, found = _parameter_shape(specs), checkpoint.shape(region)
        # The vocabulary may be padded.
        is_padded = specs[0].layer is None and len(found) == len(expected)
        if found[1:] != expected[1:] or not (
            found[:1] == expected[:1] or (is_padded and found[:1] > expected[:1])
        ):
            problems.append(
                f"{parameter} has shape {list(found)}, but config.json requires {list(expected)}"
            )
    used = {region.key: region for region in regions.values()}
    for key, region in used.items():
        leading = tuple(checkpoint.tensors[key].size[: len(region.index)])
        if leading != region.leading_sizes(shape):
            problems.append(
                f"{key} has {list(leading)} layers and experts, but config.json requires"
                f" {list(region.leading_sizes(shape))}"
            )
    problems += [
        f"{key} has no counterpart in config.json's model"
        for key in checkpoint.tensors
        if key not in used and not _NO_WEIGHTS.match(key.removeprefix(checkpoint.prefix))
    ]
    if problems:
        shown = "; ".join(problems[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ConfigError(
            f"{checkpoint.directory}: the checkpoint does not match the model of --config:"
            f" {shown}{more}"
        )
    return regions


class _ParameterWriter(SavePlanner):
    """Plan to write parameters, each of which is computed when it is written."""

    def __init__(
        self, items: list[WriteItem], resolve: Callable[[MetadataIndex], Tensor | io.BytesIO]
    ) -> None:
        self._items = items
        self._resolve = resolve

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing; the items are known."""

    def create_local_plan(self) -> SavePlan:
        """Return the plan to write all items."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans and the metadata of the checkpoint."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the tensor or the bytes of an item."""
        return self._resolve(write_item.index)


def write_checkpoint(
    source: Source,
    output: Path,
    *,
    dtype: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write a model as a torch_dist checkpoint that Megatron-LM loads with `--load OUTPUT`.

    One layer's parameter is in memory at a time.

    Args:
        source: The model to write.
        output: The directory to create.
        dtype: One of `EXPORT_DTYPES`; None keeps the stored dtypes.
        progress: Function that is called after each parameter with the number of bytes written and
            the total number of bytes.

    Raises:
        ConfigError: `output` exists or cannot be written, or Megatron-LM has no such model.
    """
    if output.exists():
        raise ConfigError(f"{output}: already exists; give a directory that does not exist yet")
    shape = read_config(source.config, "the model")
    table = weight_table(shape, source.head)
    parameters = group_by_parameter(table)
    _refuse_other_parameters(source, parameters)
    dtypes = {
        entry.name: EXPORT_DTYPES[dtype] if dtype is not None else entry.dtype
        for entry in source.entries
    }
    regions = {parameter: _target_region(parameter, shape) for parameter in parameters}
    by_index: dict[tuple[str, tuple[int, ...]], str] = {}
    items: list[WriteItem] = []
    total = 0
    for parameter, specs in parameters.items():
        region, size = regions[parameter], _parameter_shape(specs)
        offsets = (*region.index, *(0 for _ in size))
        kind = dtypes[specs[0].stored_range.name]
        by_index[region.key, offsets] = parameter
        total += prod(size) * kind.itemsize
        items.append(
            WriteItem(
                MetadataIndex(region.key, torch.Size(offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(
                        torch.Size(offsets), torch.Size((*(1 for _ in region.index), *size))
                    ),
                    TensorProperties(dtype=kind),
                    torch.Size((*region.leading_sizes(shape), *size)),
                ),
            )
        )
    empty_state = io.BytesIO()
    torch.save([None], empty_state)
    items += [
        WriteItem(
            MetadataIndex(key),
            WriteItemType.BYTE_IO,
            bytes_io_data=BytesIOWriteData(empty_state.getbuffer().nbytes),
        )
        for key in dict.fromkeys(_extra_state_keys(regions, shape))
    ]
    done = 0

    def resolve(index: MetadataIndex) -> Tensor | io.BytesIO:
        """Return the data of an entry of the index: a parameter, or the empty state."""
        nonlocal done
        if index.offset is None:
            return empty_state
        parameter = by_index[index.fqn, tuple(index.offset)]
        specs = parameters[parameter]
        tensor = torch.empty(_parameter_shape(specs), dtype=dtypes[specs[0].stored_range.name])
        for spec in specs:
            weight = select_weight(source.read(spec.stored_range.name), spec)
            view = select_part(tensor, spec.part, shape)
            view.copy_((weight.T if spec.is_transposed else weight).reshape(view.shape))
        done += tensor.nbytes
        progress(done, total)
        return tensor[(None,) * len(regions[parameter].index)]

    with convert_write_errors(output), create_directory(output) as directory:
        # Megatron-LM reads the directory "release" as a model without training state.
        _write_items(directory / "release", _ParameterWriter(items, resolve))
        (directory / "latest_checkpointed_iteration.txt").write_text("release")


def _write_items(directory: Path, planner: _ParameterWriter) -> None:
    writer = FileSystemWriter(directory)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan(
        [writer.prepare_local_plan(planner.create_local_plan())]
    )
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    torch.save({"iteration": 0, "checkpoint_version": 3.0}, directory / "common.pt")
    (directory / "metadata.json").write_text(
        json.dumps(
            {
                "sharded_backend": "torch_dist",
                "sharded_backend_version": 1,
                "common_backend": "torch",
                "common_backend_version": 1,
            }
        )
    )


def _extra_state_keys(regions: Mapping[str, _Region], shape: ModelShape) -> Iterator[str]:
    """Yield the keys of the extra states of the linear and attention modules, which are empty.

    megatron-core's modules require them. transformer-engine stores the scaling factors of fp8 in
    them; it starts with its defaults if they are empty.
    """
    for parameter, region in regions.items():
        if not parameter.endswith(".weight") or ".linear_" not in parameter:
            continue
        index = region.index or (0,)
        sizes = region.leading_sizes(shape) or (1,)
        shard = f"shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"
        module = region.key.removesuffix(".weight")
        yield f"{module}._extra_state/{shard}"
        if module.endswith(".linear_qkv"):
            yield f"{module.removesuffix('linear_qkv')}core_attention._extra_state/{shard}"


def _refuse_other_parameters(
    source: Source, parameters: Mapping[str, Sequence[TensorSpec]]
) -> None:
    """Raise ConfigError if the model has parameters that Megatron-LM's models do not have."""
    if source.head != "vocabulary":
        raise ConfigError(
            f"{source.directory}: a model with a scalar head cannot be written as torch_dist, since"
            " Megatron-LM has no such head; leave out --format"
        )
    if others := [name for name in parameters if not _STANDARD_PARAMETER.fullmatch(name)]:
        raise ConfigError(
            f"{source.directory}: cannot be written as torch_dist, since Megatron-LM's models have"
            f" no parameter {others[0]}; leave out --format"
        )


def _target_region(parameter: str, shape: ModelShape) -> _Region:
    """Return the position at which Megatron-LM expects a parameter.

    With transformer-engine, the norm before a linear layer belongs to that layer, except before
    experts.
    """
    regions = list(_regions(parameter))
    match = re.match(r"decoder\.layers\.(\d+)\.", parameter)
    if match is None:
        return regions[0]
    layer = shape.layers[int(match[1])]
    # The layers are one tensor if all have the same parameters.
    is_stacked = len({each.has_experts for each in shape.layers}) == 1
    keeps_norm = "pre_mlp_layernorm" in parameter and layer.has_experts
    candidates = regions[:2] if keeps_norm else regions[-2:]
    return candidates[0 if is_stacked else 1]
