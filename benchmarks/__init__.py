"""Measures the package against what people do today and what the machine can do.

    python -m benchmarks formats     rows per second from every format, warm cache
    python -m benchmarks cold        random rows from the disk
    python -m benchmarks rows        what a batch of small rows costs in the loader
    python -m benchmarks memory      a file of 10^9 rows; a long stream of compressed blocks
    python -m benchmarks plan        what the order of an epoch costs, from 10^3 to 10^9 rows
    python -m benchmarks prefetch    what PrefetchCallback gains and costs, and threads that adjust themselves
    python -m benchmarks convert     converters, against Pillow alone and the disk

Contenders are measured in one run, in turns, so that a busy neighbour slows all of them; each figure is the median.
`--json FILE` saves the figures with the machine they come from. The data is made in a temporary folder and removed.
"""
