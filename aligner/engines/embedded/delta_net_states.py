"""States of the gated delta nets of the sequences that the embedded engine decodes."""

import torch

from aligner.models.shape import ModelShape


class DeltaNetStates:
    """States of one tensor-parallel rank: each sequence in flight has a row.

    Unlike keys and values, a state belongs to one length of its sequence only. It cannot be used
    for a shorter prefix.
    """

    def __init__(
        self, shape: ModelShape, tensor_parallel_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Create states of no row; `resize` allocates the memory.

        Args:
            shape: Dimensions of the model.
            tensor_parallel_size: Number of tensor-parallel ranks.
            device: Device of the memory.
            dtype: Data type of the inputs of the convolutions.
        """
        net = shape.delta_net
        self._layers = shape.num_layers - shape.num_attention_layers
        self._history_dims: tuple[int, ...] = ()
        self._state_dims: tuple[int, ...] = ()
        if net is not None:
            self._history_dims = (net.conv_width - 1, net.channels // tensor_parallel_size)
            heads = net.value_heads // tensor_parallel_size
            self._state_dims = (heads, net.key_dim, net.value_dim)
        self.histories = torch.empty(0, device=device, dtype=dtype)
        """Last inputs of the convolutions, [layers with a delta net, rows, conv width - 1,
        channels]."""
        self.states = torch.empty(0, device=device, dtype=torch.float32)
        """States of the delta rule, [layers with a delta net, rows, value heads, key dim, value
        dim]."""

    def resize(self, rows: int) -> None:
        """Allocate memory for a number of rows, and discard the states."""
        self.histories = self.histories.new_zeros(self._layers, rows, *self._history_dims)
        self.states = self.states.new_zeros(self._layers, rows, *self._state_dims)

    def free(self) -> None:
        """Free the memory."""
        self.histories = self.histories.new_empty(0)
        self.states = self.states.new_empty(0)
