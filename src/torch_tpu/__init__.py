"""Compatibility names of the project torchtpu, and nothing else.

Transformers, Ray and PyTorch look for a module of this name when they meet a device "tpu". It is not Google's
torch-tpu; if that distribution is installed too, torchtpu says so and does nothing.
"""
