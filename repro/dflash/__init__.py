"""A standalone DFlash trainer: the program in which the tracing bug was met.

``model.py`` holds the drafter and the frozen target, ``data.py`` text, anchors and labels,
``train.py`` the loop, the workers and the command line::

    python -m repro.dflash.train --preset tiny --drafters cpu,cpu,cpu --steps 60
"""
