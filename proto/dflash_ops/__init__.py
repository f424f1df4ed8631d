"""Tensor functions on which drafter and verifier must agree exactly.

Coupled sampling only works when both executors compute the same noise and the same processors, and
both read paged pools the same way. Depends on torch,
transformers' attention registry and ``dflash_wire``.
"""
