"""Tensors for another process on the same GPU, in the form that TensorRT-LLM's workers take them."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping

from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from aligner.errors import AlignerError


def ipc_handles(tensors: Mapping[str, Tensor], device_uuid: str) -> dict[str, str]:
    """Handles by which the worker on the GPU `device_uuid` opens these tensors: {uuid: base64 of a pickled list}.

    The list's entries are (name, (function, arguments)); function(*arguments) gives the tensor. A CUDA tensor is not
    copied: the receiver opens its memory, so the tensors have to live, unchanged, until it has answered; after that
    `torch.cuda.ipc_collect()` frees what it gave back. CPU tensors travel by value.
    Raises AlignerError naming the tensors and their devices when they lie on several.
    """
    devices = sorted({str(tensor.device) for tensor in tensors.values()})
    if len(devices) > 1:
        where = ", ".join(f"{name} ({tensor.device})" for name, tensor in tensors.items())
        raise AlignerError(f"tensors for GPU {device_uuid} lie on several devices, one is allowed: {where}")
    entries = [(name, reduce_tensor(tensor.detach())) for name, tensor in tensors.items()]
    return {device_uuid: base64.b64encode(pickle.dumps(entries)).decode()}
