"""Which rows, in which order: a plan computes them, so that nothing grows with their number.

permutation   a random order of any number of rows, computed where it is needed
order         the four orders of an epoch: sequential, global shuffle, block shuffle, weighted sampling
rows          which rows are used: all, a subset, one side of a split
epoch         positions dealt out to ranks and batches, and what is left of an epoch after a resume
plan          `Plan`, which chooses the order of a reader
"""

from lightning_fastio.plan.plan import AHEAD_BYTES, Plan, Shuffle, class_imbalance

__all__ = ["AHEAD_BYTES", "Plan", "Shuffle", "class_imbalance"]
