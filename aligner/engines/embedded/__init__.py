"""A KV-cached batched decoder in plain PyTorch."""
