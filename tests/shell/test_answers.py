"""Completions are asked for by all processes together: what one cannot draw, none goes on with."""

import threading
import types

import attrs
import numpy as np
import pytest
import torch

from core import metrics, ports
from shell import answers, mistake, prompts, tiny

PROMPTS = [prompts.Prompt(tokens=np.array([1, 2]), columns={"prompt": "a"}) for _ in range(2)]


@attrs.frozen
class Broken:
    """An engine that cannot draw for some prompts."""

    fails: tuple[int, ...]

    def generate(self, params, prompts, numbers, *, num_samples, sampling, key):
        if set(numbers) & set(self.fails):
            raise ValueError("the scores of a prompt are not finite")
        return [[] for _ in numbers]


def together(fails):
    """What two processes, here threads, raise when they ask for two prompts."""
    met, given, raised = threading.Barrier(2, timeout=20), {}, {}

    def ranks(index):
        def merge(means):
            given[index] = means
            met.wait()
            return metrics.merge(given[0], given[1])

        return ports.Ranks(index=index, num=2, sum=lambda tree: tree, merge=merge)

    def run(index):
        asking = answers.Asking(
            engine=Broken(fails), sampling=ports.Sampling(), tokenizer=tiny.tokenizer(), functions=(),
            ranks=ranks(index),
        )  # fmt: skip
        try:
            answers.ask(asking, {}, PROMPTS, [0, 1], num_samples=1, key=0, state=None)
        except mistake.Mistake as told:
            raised[index] = str(told)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return raised


@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_process_cannot_draw_ends_all_of_them(failing):
    raised = together((failing,))
    assert "not finite" in raised[failing]
    assert "another process could not draw" in raised[1 - failing]


def drawn(problem):
    """Draw from an engine that fails."""

    def generate(*_, **named):
        raise problem

    asking = types.SimpleNamespace(engine=types.SimpleNamespace(generate=generate), sampling=None)
    answers.drawn(asking, {}, [], [], num_samples=1, key=0)


@pytest.mark.parametrize(
    "problem",
    [
        MemoryError(),
        torch.OutOfMemoryError("Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_a_lack_of_memory_is_told(problem):
    with pytest.raises(mistake.Mistake, match="do not fit the memory"):
        drawn(problem)


def test_another_fault_that_names_memory_is_raised_as_it_is():
    with pytest.raises(RuntimeError, match="illegal"):
        drawn(RuntimeError("CUDA error: an illegal memory access was encountered"))
