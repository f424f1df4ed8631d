"""Recipe of the embedded demo pair: corpus, tokenizer, target, responses, drafter.

``python -m drafter.training.demo all --gsm8k FILE --work DIR`` reproduces ``models/demo``.
"""
