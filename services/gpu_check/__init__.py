"""What a GPU does with the engines of this repository: checks and timings in one run, ``make gpu-check``.

Needs torch, transformers and msgpack, and nothing else that the server needs: no Ray, no ZeroMQ, no network.
Weights are random, in the shape of Qwen3-8B and its published drafter.
"""
