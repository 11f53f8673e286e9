"""Triton kernels, one idea a file, each beside its torch reference. Any file reads without another.

Reading order: rms_norm (one row a program, fusion), swiglu (tiles, masks), rotary (strides, layouts), then whatever
draws you. README.md says what every kernel file holds and what the tools below take from it.

launch.py   triton or its stand-in, the backend switch, the checks every launcher makes
catalog.py  Case, Compilation, Bench: what a kernel file hands to tests, to the compiler and to the GPU run
aot.py      python -m kernels aot: compiles everything for three generations of GPU without having one
gpu.py      python -m kernels gpu: tests and times everything on the GPU at hand; gpu_model.py: the model end to end
watch.py    what keeps that run going when a kernel takes the GPU down or never returns
"""
