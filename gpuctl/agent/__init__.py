"""What runs on a node: standard library, ``gpuctl.core`` and ``gpuctl.errors`` only, no torch."""
