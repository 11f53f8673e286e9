"""Tests of the kernels: through Triton's interpreter where there is no GPU, on the GPU where there is one."""
