"""Bottom layer: the records, ports and errors that every other package agrees on.

Standard library and msgpack only: no torch, no ray, no numpy.
"""
