import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from core import metrics, record

NUMBERS = st.floats(-1e3, 1e3, width=32)
ANY = st.one_of(NUMBERS, st.sampled_from([math.nan, math.inf, -math.inf]))


def test_a_window_with_nan_logs_the_mean_of_the_rest_and_their_count():
    window = [0.5, math.nan, math.nan, 0.8, 0.6, 0.7]
    merged = metrics.merge(*(metrics.collect({"kl": torch.tensor(v)}) for v in window))
    assert metrics.values(merged) == pytest.approx({"kl": 0.65, "nonfinite/kl": 2.0})


def test_unequal_micro_batches_are_weighted_by_their_tokens():
    parts = [{"kl": metrics.mean(torch.full((10,), 1.0))}, {"kl": metrics.mean(torch.full((30,), 3.0))}]
    assert metrics.values(metrics.merge(*parts)) == {"kl": 2.5}
    parts = [{"loss": metrics.whole(1.0, 10)}, {"loss": metrics.whole(torch.tensor(3.0), torch.tensor(30))}]
    assert metrics.values(metrics.merge(*parts)) == {"loss": 2.5}


def test_the_loss_shows_nan_as_nan():
    window = [{"loss": metrics.whole(torch.tensor(v))} for v in (1.0, math.nan, 2.0)]
    assert math.isnan(metrics.values(metrics.merge(*window))["loss"])


@hypothesis.given(
    st.lists(st.lists(ANY, max_size=5), min_size=1, max_size=5), st.randoms(use_true_random=False)
)
def test_any_cut_and_order_into_packs_gives_the_metrics_of_the_whole(packs, random):
    def of(rows):
        values = torch.tensor(rows, dtype=torch.float64)
        return {
            "x/min": metrics.minimum(values),
            "x/max": metrics.maximum(values),
            **metrics.collect({"x": values}),
        }

    whole = [row for rows in packs for row in rows]
    random.shuffle(packs)
    merged = metrics.values(metrics.merge(*(of(rows) for rows in packs)))
    assert merged == pytest.approx(metrics.values(of(whole)), rel=1e-9, abs=1e-9)
    finite = [row for row in whole if math.isfinite(row)]
    assert merged.get("nonfinite/x", 0) == len(whole) - len(finite)
    assert ("x" in merged) == ("x/min" in merged) == ("x/max" in merged) == bool(finite)
    if finite:
        assert merged["x/min"] == min(finite)
        assert merged["x/max"] == max(finite)
        assert merged["x"] == pytest.approx(sum(finite) / len(finite), rel=1e-9, abs=1e-9)


@hypothesis.given(st.lists(st.tuples(NUMBERS, st.booleans()), min_size=1))
def test_nan_where_nothing_is_weighed_changes_nothing(rows):
    values, mask = torch.tensor([v for v, _ in rows]), torch.tensor([m for _, m in rows])
    spoiled = torch.where(mask, values, torch.nan)

    def of(values):
        return metrics.values(
            {
                "mean": metrics.mean(values, mask),
                "nonfinite/mean": metrics.nonfinite(values, mask),
                "min": metrics.minimum(values, mask),
                "max": metrics.maximum(values, mask),
            }
        )

    assert of(values) == of(spoiled)


def test_labels_that_are_not_trained_do_not_enter_the_entropy():
    entropies, trained = torch.tensor([5.0, 2.0, 1.0, 3.0]), torch.tensor([False, True, True, False])
    assert metrics.values({"entropy": metrics.mean(entropies, trained)}) == {"entropy": 1.5}


def test_a_weight_need_not_be_one():
    mean = metrics.mean(torch.tensor([1.0, 3.0, math.inf]), torch.tensor([10.0, 30.0, 5.0]))
    assert metrics.values({"x": mean}) == {"x": 2.5}


def test_what_nothing_was_seen_of_is_left_out():
    nothing = torch.empty(0)
    found = {
        "mean": metrics.mean(nothing),
        "min": metrics.minimum(nothing),
        "max": metrics.maximum(nothing),
        "nonfinite/mean": metrics.nonfinite(nothing),
        "dropped": metrics.Sum(total=0),
    }
    assert metrics.values(found) == {"dropped": 0.0}


def test_a_name_that_only_some_ranks_have_is_kept():
    merged = metrics.merge(
        {"a": metrics.Sum(total=1)}, {"b": metrics.Sum(total=2)}, {"a": metrics.Sum(total=3)}
    )
    assert metrics.values(merged) == {"a": 4.0, "b": 2.0}


def test_one_name_in_two_forms_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'reward' came as Mean and Sum"):
        metrics.merge({"reward": metrics.whole(1.0)}, {"reward": metrics.Sum(total=1.0)})


def test_metrics_carry_no_gradient_and_hold_no_graph():
    rows = torch.tensor([1.0, 2.0], requires_grad=True) * 2
    found = metrics.collect({"x": rows}) | {
        "min": metrics.minimum(rows),
        "max": metrics.maximum(rows),
        "loss": metrics.whole(rows.sum()),
    }
    leaves = [leaf for leaf in record.tree.leaves(found) if isinstance(leaf, torch.Tensor)]
    assert len(leaves) == 6
    assert not any(leaf.requires_grad for leaf in leaves)


def test_a_mean_is_a_tree_of_two_leaves():
    mean = metrics.mean(torch.tensor([1.0, 2.0]))
    assert [float(leaf) for leaf in record.tree.leaves(mean)] == [3.0, 2.0]
    doubled = record.tree.map(lambda leaf: leaf * 2, mean)
    assert metrics.values({"x": doubled}) == {"x": 1.5}


def test_on_the_host_metrics_still_merge_to_the_same_numbers():
    parts = [
        metrics.collect({"x": torch.tensor([1.0, math.nan])}) | {"m": metrics.minimum(torch.tensor([4.0]))},
        metrics.collect({"x": torch.tensor([2.0, 6.0])}) | {"m": metrics.minimum(torch.tensor([3.0]))},
    ]
    on_host = [metrics.host(part) for part in parts]
    assert all(isinstance(leaf, float) for leaf in record.tree.leaves(on_host))
    assert metrics.values(metrics.merge(*on_host)) == metrics.values(metrics.merge(*parts))
    assert metrics.values(metrics.merge(on_host[0], parts[1])) == metrics.values(metrics.merge(*parts))
    assert metrics.values(metrics.merge(*parts)) == {"x": 3.0, "nonfinite/x": 1.0, "m": 3.0}


def test_half_precision_rows_are_summed_in_float32():
    rows = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    assert metrics.values({"x": metrics.mean(rows)}) == {"x": 1.0}
    assert float(metrics.mean(rows).total) == 4096.0
    assert metrics.values({"hit": metrics.mean(torch.tensor([True, False]))}) == {"hit": 0.5}
