"""Garbage collection at chosen steps instead of any moment."""

from __future__ import annotations

import gc


class ScheduledCollection:
    """Takes over from Python's automatic garbage collection while a model trains.

    A collection stops the process for some tens of milliseconds. Where each rank collects when it likes, all the
    others wait for it in the next all-reduce; on a schedule they stop together. Young objects are collected every so
    many steps, everything where a stage ends (as torchtitan does).
    """

    def __init__(self, every_n_steps: int) -> None:
        self._every_n_steps = every_n_steps
        self._is_on = False

    def start(self) -> None:
        """Switch automatic collection off, unless the user did already."""
        if gc.isenabled():
            gc.collect()
            gc.disable()
            self._is_on = True

    def after_step(self, step: int) -> None:
        """Collect young objects if it is time."""
        if self._is_on and step % self._every_n_steps == 0:
            gc.collect(1)

    def after_stage(self) -> None:
        """Collect everything."""
        if self._is_on:
            gc.collect()

    def stop(self) -> None:
        """Switch automatic collection on again. Idempotent."""
        if self._is_on:
            gc.enable()
            self._is_on = False
