"""Merge an adapter into its base: `python -m shell.merge ADAPTER OUTPUT_DIR [--dtype float32]`."""

import pathlib
import sys
from collections.abc import Sequence

import attrs
import safetensors

from adapters import peft_format
from shell import adapter, config, entries, entry, files, hubs, mistake, options

READ = ("dtype", "torch_dtype", "revision", "trust_remote_code", "tokenizer", "rope_scaling")
USAGE = "python -m shell.merge ADAPTER OUTPUT_DIR [--dtype float32]"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the base with the adapter in its weights; the exit status is returned."""
    words = list(sys.argv[1:] if argv is None else argv)
    return entry.guarded(lambda: run(words))


def run(words: Sequence[str]) -> int:
    """Read the words, then load torch and merge."""
    if words[:1] in (["-h"], ["--help"], ["help"]):
        print(
            f"usage: {USAGE}\n\nADAPTER is a folder in PEFT's format, such as a run's model/, or the hub "
            "id of one. The sum is made in float32 and written in --dtype, the base's own when not set; it "
            "loads without PEFT. Positions are scaled as in the run whose model/ ADAPTER is, or as "
            "--rope_scaling says."
        )
        return 0
    if len(words) < 2 or words[0].startswith("-") or words[1].startswith("-"):
        raise mistake.Mistake(f"{' '.join(words) or 'nothing'} came; {USAGE} was wanted.")
    told = config.written(words[2:])
    for one in told:
        if one.key not in READ:
            raise mistake.Mistake(f"{one.where}: merging does not read {one.key}; {USAGE} was wanted.")
    revision = next((one.value for one in told if one.key == "revision"), None)
    hubs.fetched(options.Options(model=words[0], revision=revision))
    source, place = pathlib.Path(words[0]), pathlib.Path(words[1])
    found = hubs.folder(words[0], revision)
    if found is None:
        inside = source / "model"
        hint = f" Did you mean {inside}?" if adapter.is_one(inside) else ""
        raise mistake.Mistake(f"{source} is no adapter: a folder with {peft_format.CONFIG} was wanted.{hint}")
    _check(place)
    # The rules of a run's options are those of a merge; of the rows that a run must name none are read.
    command = config.resolved("sft", [*entries.from_values({"model": str(source), "dataset": "demo"}), *told])
    for note in command.notes:
        print(note, file=sys.stderr)
    merge(command.options, place, scalar=adapter.read(found).scalar)
    print(f"the merged model is in {place}")
    return 0


def _check(place: pathlib.Path) -> None:
    """Refuse a place that cannot be written to before anything is loaded."""
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise mistake.Mistake(f"{place} is not empty; name a folder that is, or a new one.")
    try:
        files.check(place)
    except OSError as problem:
        why = problem.strerror
        raise mistake.Mistake(
            f"{place} cannot be written: a folder beside it is needed first ({why}); name another one."
        ) from problem


def merge(chosen: options.Options, folder: pathlib.Path, *, scalar: bool) -> None:
    """Write the model that an adapter and its base are together.

    Args:
        chosen: whose `model` and `init_from` they are.
        folder: to write to.
        scalar: it is a reward model.

    Raises:
        mistake.Mistake: the base cannot be loaded, is not that of the adapter, or the sum cannot be written.
    """
    from adapters import cpu, lora  # torch: only after the options are right
    from shell import chat, choose, low_rank, prepare

    prepare.quiet()
    if chosen.dtype == "auto":
        named = str(choose.config(chosen).dtype or "float32").removeprefix("torch.")
        chosen = attrs.evolve(chosen, dtype="float32" if named == "float16" else named)
    model, params = choose.model(chosen, cpu.DEVICE, scalar=scalar, training=False)
    params = low_rank.read(model, params, pathlib.Path(str(chosen.init_from)))
    tokenizer = choose.tokenizer(chosen)
    if scalar:
        tokenizer.pad_token_id = model.module.config.pad_token_id = chat.spare_id(tokenizer)
    try:
        with files.whole(folder) as made:
            lora.save_merged(model, params, str(made))
            tokenizer.save_pretrained(made)
    except (OSError, safetensors.SafetensorError) as problem:
        why = getattr(problem, "strerror", None) or problem
        raise mistake.Mistake(f"the merged model cannot be written to {folder} ({why})") from problem


if __name__ == "__main__":
    sys.exit(main())
