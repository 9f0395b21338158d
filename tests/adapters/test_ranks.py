"""Two processes that share a step do what one does."""

import json

import pytest

from adapters import cpu, ranks
from core import ports
from tests import warm

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run two processes as a launcher would, and one without a launcher."""
    folder = tmp_path_factory.mktemp("ranks")
    for num in (1, 2):
        code, _, err = warm.program("tests.adapters.two_ranks", str(folder), ranks=num)
        assert code == 0, err
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("alone", "0", "1")}


def test_each_process_knows_its_place(found):
    assert [(found[n]["index"], found[n]["num"]) for n in ("alone", "0", "1")] == [(0, 1), (0, 2), (1, 2)]


def test_tensors_of_any_width_and_dtype_are_summed_and_left_as_they_were(found):
    for rank in ("0", "1"):
        assert found[rank]["sum"]["wide"] == [0.0, 3.0, 6.0, 9.0, 12.0]
        assert found[rank]["sum"]["narrow"] == 3
        assert found[rank]["sum"]["double"] == [[pytest.approx(0.3)] * 2] * 2
        assert found[rank]["untouched"]


def test_metrics_are_merged_by_their_weights_also_those_that_one_process_has_alone(found):
    for rank in ("0", "1"):
        assert found[rank]["merged"] == {"micro": pytest.approx(2.5), "only": pytest.approx(1.0)}


def test_both_processes_end_with_the_same_bits(found):
    assert found["0"]["params"] == found["1"]["params"]
    assert found["0"]["metrics"] == found["1"]["metrics"]


def test_two_processes_train_as_one_does(found):
    for name, values in found["alone"]["params"].items():
        assert found["0"]["params"][name] == pytest.approx(values, rel=1e-9, abs=1e-11)
    assert found["0"]["metrics"] == pytest.approx(found["alone"]["metrics"], rel=1e-9)


def test_a_process_without_a_launcher_is_alone(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    assert ranks.join(cpu.DEVICE) is ports.ALONE
    ranks.wait(ports.ALONE)
    ranks.leave()
