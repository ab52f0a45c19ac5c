"""The bundled trainer: a Llama-style decoder under data parallelism and ZeRO, one file a mechanism.

Run by gpuctl's fork server; by hand, under any launcher with torchrun's environment:
``python -m gpuctl.trainer CONFIG.json``.
"""
