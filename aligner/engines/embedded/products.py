"""Matrix products with the model's weights, on CPUs with copies of them in the order in which
oneDNN reads them."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models import batch_invariant

_FEWEST_ROWS = 1 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 2
"""One row alone with a packed weight takes half of the time with AVX-512, and longer without."""
_ROWS = 256
"""The number of rows that weights are packed for; they serve any other as well."""


class Products:
    """x @ weight.T + bias for the weights that serve, by megatron-core's names without `.weight`
    and `.bias`."""

    def __init__(self, *, exact: bool, packed: bool) -> None:
        """`exact` is `engine.exact`; `packed`: multiply on CPUs with packed copies, which are made
        when first used."""
        self._plain = batch_invariant.linear if exact else F.linear
        self._packed_dtypes = _packed_dtypes() if packed and not exact else ()
        self._packed: dict[str, Tensor] = {}
        self._weights: Mapping[str, Tensor] = {}

    def use(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these from now on. To be called again when their values have changed."""
        self._weights = weights
        self._packed.clear()

    def linear(self, x: Tensor, name: str, *, with_bias: bool = True) -> Tensor:
        """x [N, inputs] to [N, outputs], with a bias where the layer has one."""
        weight, bias = (
            self._weights[name + ".weight"],
            (self._weights.get(name + ".bias") if with_bias else None),
        )
        if (
            len(x) < _FEWEST_ROWS
            or weight.device.type != "cpu"
            or weight.dtype not in self._packed_dtypes
        ):
            return self._plain(x, weight, bias)
        packed = self._packed.get(name)
        if packed is None:
            packed = self._packed[name] = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return product

    def expert(self, x: Tensor, name: str, index: int) -> Tensor:
        """The same with one of the experts' weights, [experts, outputs, inputs], which are never
        packed."""
        return self._plain(x, self._weights[name + ".weight"][index], None)


def _packed_dtypes() -> tuple[torch.dtype, ...]:
    """What oneDNN multiplies by packed weights here: bfloat16 where the processor has instructions
    for it."""
    if not torch.backends.mkldnn.is_available():
        return ()
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if has_bf16 else (torch.float32,)
