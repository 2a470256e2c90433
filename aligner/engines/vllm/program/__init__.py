"""Program that runs vLLM in vLLM's own Python environment.

Nothing here imports aligner. aligner imports only `weight_memory` from this package.
"""
