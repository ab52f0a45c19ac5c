"""gpuctl launches and looks after distributed training on GPU machines reachable by SSH."""

__version__ = "0.1.0"
