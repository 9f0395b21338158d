"""From a place in the data to the samples of a step."""

import numpy as np
import pytest

from shell import data, feed, mistake


def test_a_place_far_in_the_data_reads_the_rows_of_its_step_alone():
    read = []

    class Rows:
        parts = (data.Part(name="rows", start=0, stop=1_000_000),)

        def __len__(self):
            return 1_000_000

        def samples(self, row):
            read.append(row)
            return [row]

    feeding = feed.Prepared(rows=Rows(), batch_size=8, seed=3)
    taken, place = feeding.take(900_000)
    assert (len(taken), place) == (8, 900_008)
    assert read == taken
    order = data.epoch_order(Rows(), seed=3, epoch=0)
    assert taken == order[900_000:900_008].tolist()
    assert np.array_equal(np.sort(order), np.arange(1_000_000))


def test_a_feed_goes_through_every_row_once_an_epoch_and_in_a_new_order_each_time():
    class Rows:
        parts = (data.Part(name="rows", start=0, stop=10),)

        def __len__(self):
            return 10

        def samples(self, row):
            return [row]

    feeding, place, epochs = feed.Prepared(rows=Rows(), batch_size=4, seed=1), 0, []
    for _ in range(3):
        rows = []
        for _ in range(feeding.steps_per_epoch):
            taken, place = feeding.take(place)
            rows += taken
        epochs.append(rows)
    assert place == 30
    assert feeding.epoch(place) == 3.0
    assert all(sorted(rows) == list(range(10)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3


def test_an_id_that_the_model_has_no_embedding_for_is_refused():
    feed.check_vocabulary(np.array([0, 4]), 5)
    feed.check_vocabulary(np.array([], np.int64), 5)
    with pytest.raises(mistake.Mistake, match="id 5 came"):
        feed.check_vocabulary(np.array([0, 5]), 5)
