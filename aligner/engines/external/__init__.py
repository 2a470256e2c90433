"""Shared code of the engines that run as external programs, vLLM and TensorRT-LLM.

The first rank of a replica controls the program.
"""
