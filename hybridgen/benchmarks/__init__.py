"""What the machine reaches: the CPU's kernels against its memory (cpu.py), the GPU's link (link.py)."""
