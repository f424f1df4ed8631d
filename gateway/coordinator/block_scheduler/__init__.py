"""The block scheduler: how wide every row of a step drafts and verifies. Pure Python and NumPy.

``scheduler.BlockScheduler`` is what the coordinator talks to; ``records`` is their language. ``survival``
knows how many draft tokens will be accepted, ``cost`` what a step takes, ``allocation`` weighs one against
the other, and ``guards`` keeps the choice from flapping.
"""
