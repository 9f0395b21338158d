import io

import accelerate.tracking
import pytest

from shell import log, mistake, progress, trackers


class Fake(accelerate.tracking.GeneralTracker):
    name = "trackio"
    requires_logging_directory = False
    broken = ""

    def __init__(self, project, **settings):
        super().__init__()
        self.calls = [("made", project, settings)]

    @property
    def tracker(self):
        return self

    def start(self):
        if self.broken == "start":
            raise RuntimeError("no login\nrun trackio login")

    def store_init_configuration(self, values):
        self.calls.append(("options", values))

    def log(self, values, step=None, **more):
        if self.broken == "log":
            raise OSError("network is unreachable")
        self.calls.append((step, values))

    def finish(self):
        self.calls.append("finished")


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(Fake, "broken", "")
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "trackio", Fake)
    monkeypatch.setattr(
        accelerate.tracking, "get_available_trackers", lambda: [accelerate.tracking.LoggerType.TRACKIO]
    )
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    return Fake


def test_metrics_reach_a_tracker_under_the_names_of_transformers(tmp_path, fake):
    (tracker,) = trackers.start(["none", "trackio"], tmp_path, {"model": tmp_path, "learning_rate": 1e-5})
    made = log.Journal(tmp_path, progress.Display(stream=io.StringIO()), report_to=(tracker,))
    made.log(1, {"loss": 2.0, "eval_loss": 3.0})
    made.close()
    (_, project, settings), *rest = tracker.calls
    assert project == "espalier"
    assert settings["resume"] == "never"
    assert rest == [
        ("options", {"model": str(tmp_path), "learning_rate": 1e-5}),
        (1, {"train/loss": 2.0, "eval/loss": 3.0}),
        "finished",
    ]


def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    (first,) = trackers.start(["trackio"], tmp_path, {})
    (again,) = trackers.start(["trackio"], tmp_path, {}, resumed=5)
    assert first.calls[0][1] == again.calls[0][1] == "mine"
    assert first.calls[0][2]["name"] == again.calls[0][2]["name"]
    assert again.calls[0][2]["resume"] == "allow"


def test_a_tracker_that_does_not_start_is_told_in_one_line(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(Fake, "broken", "start")
    with pytest.raises(mistake.Mistake) as told:
        trackers.start(["trackio"], tmp_path, {})
    assert str(told.value) == (
        "report_to: trackio did not start: no login run trackio login; mend it, or --report_to none"
    )


def test_a_tracker_that_is_unknown_or_not_installed_is_told(tmp_path, fake):
    with pytest.raises(
        mistake.Mistake, match="'tensorbord' is not a tracker; choose of trackio, tensorboard, wandb"
    ):
        trackers.start(["tensorbord"], tmp_path, {})
    with pytest.raises(mistake.Mistake, match="wandb is not installed; pip install wandb"):
        trackers.start(["wandb"], tmp_path, {})


def test_a_tracker_that_fails_on_the_way_is_told_once_and_the_run_goes_on(tmp_path, fake, monkeypatch):
    made = log.Journal(
        tmp_path, progress.Display(stream=io.StringIO()), report_to=trackers.start(["trackio"], tmp_path, {})
    )
    monkeypatch.setattr(Fake, "broken", "log")
    for step in (1, 2):
        made.log(step, {"loss": 1.0})
    made.close()
    assert made.display.notes == ["trackio failed and is no longer reported to: network is unreachable"]
    assert len(log.read(tmp_path / "metrics.jsonl")) == 2


def test_tensorboard_writes_into_the_output_folder(tmp_path):
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    (tracker,) = trackers.start(["tensorboard"], tmp_path, {"learning_rate": 1e-5, "model": None})
    tracker.log({"train/loss": 1.0}, step=1)
    tracker.finish()
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
