"""What a chat model's text means: reasoning, content and tool calls, found while it streams.

A parser is fed text in pieces and returns deltas. All of them are chunk-invariant: concatenated, the deltas
depend on the text alone, not on how it was cut. What cannot be told yet is held back.
"""
