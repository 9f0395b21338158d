"""What a run begins with, in one line: where it runs, in what, and how much of the model it trains."""

from shell import choose, prepare


def line(ready: prepare.Ready) -> str:
    """Tell device, dtype, processes, parameters, those that are trained, and the length of a run.

    Args:
        ready: what is known before the model is loaded.
    """
    chosen, num, adapter = ready.command.options, ready.shape.parameters, ready.levers.adapter
    held, run = (str(f(chosen, ready.device)).removeprefix("torch.") for f in (choose.dtype, choose.products))
    dtype = held if held == run else f"{held} with products in {run}"
    trained = "all trained"
    if adapter is not None:
        num += adapter
        trained = f"{adapter:,} of them ({100 * adapter / num:.3g}%) trained"
    where = f"{ready.command.algorithm} on {ready.device.name}"
    processes = "1 process" if ready.ranks.num == 1 else f"{ready.ranks.num} processes"
    steps = "1 step" if ready.num_steps == 1 else f"{ready.num_steps:,} steps"
    return (
        f"{where}, {dtype}, {processes}: {num:,} parameters, {trained}; {steps} of batch_size "
        f"{chosen.batch_size}"
    )
