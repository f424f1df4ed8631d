"""A closed-loop simulator in which block schedulers are judged: ``python -m loadtest.simulator``.

``worlds`` knows the truth about acceptance, ``costs`` the truth about time, ``loop`` plays streams against
a policy, ``baselines`` are what others ship, ``matrix`` runs every policy in every cell and ``bars`` says
what must hold. All figures of it are simulated: orderings and failures carry over to a server, numbers do
not.
"""
