"""Charts of training runs: ticks, thinning, coordinates and families, worked by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.charts.lines import MAX_POINTS, LineChart, LineData, line_chart, tick_texts
from rl.charts.run_figures import family_of, run_charts, runs_charts


def chart_of(*points: tuple[int, float], share: bool = False) -> LineChart:
    chart = line_chart("loss", "Loss", [LineData("training", points)], share=share)
    assert chart is not None
    return chart


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.0, 0.25, 0.5], ["0", "0.25", "0.50"]),
        ([-0.015, -0.01, -0.005, 0.0], ["-0.015", "-0.010", "-0.005", "0"]),
        ([0, 20_000, 40_000], ["0", "20,000", "40,000"]),
        ([0.0, 5e-5, 1e-4], ["0", "5e-5", "1e-4"]),
        ([2.8e-6, 3e-6, 3.2e-6], ["2.8e-6", "3e-6", "3.2e-6"]),
        ([0, 1e7], ["0", "1e7"]),
    ],
)
def test_ticks_have_the_decimals_they_need(values: list[float], texts: list[str]) -> None:
    assert tick_texts(values) == texts


def test_points_of_a_chart() -> None:
    # one point is no chart
    lines = [LineData("training", [(1, 0.7)]), LineData("held out", [(1, 0.6)])]
    assert line_chart("loss", "Loss", lines) is None
    assert line_chart("loss", "Loss", []) is None
    # what is not finite is left out
    chart = chart_of((1, math.nan), (2, 1.0), (3, math.inf), (4, 2.0))
    assert chart.data["steps"] == [2, 4]
    assert chart.data["lines"][0]["values"] == [1.0, 2.0]
    # a long history is thinned by means
    chart = chart_of(*((step, float(step)) for step in range(10_000)))
    assert chart.lines[0].path.count("L") + 1 == MAX_POINTS
    assert chart.data["lines"][0]["values"][0] == 12.0  # the mean of the first 25
    assert chart.summary.startswith("Loss: training from 0 at step 0 to 9,999 at step 9999")


def test_lines_with_other_steps_share_one_axis_with_gaps() -> None:
    lines = [
        LineData("training", [(1, 3.0), (2, 2.0), (4, 1.0)]),
        LineData("held out", [(3, 2.5)], held_out=True),
    ]
    chart = line_chart("loss", "Loss", lines)
    assert chart.data["steps"] == [1, 2, 3, 4]
    expected = [[3.0, 2.0, None, 1.0], [None, None, 2.5, None]]
    assert [line["values"] for line in chart.data["lines"]] == expected
    assert chart.lines[1].path == ""
    assert chart.lines[1].markers == [("66.67%", "25.00%")]
    assert "held out 2.5 at step 3" in chart.summary


LOSSES = [(1, 0.69), (2, 0.5), (3, 0.4)]


def test_a_loss_that_spans_much_has_powers_of_ten() -> None:
    charts = run_charts({"loss": [(1, 0.69), (2, 0.01), (3, 1.4e-4)], "eval_loss": [(3, 0.471)]})
    (chart,) = charts.main_family.charts
    assert [(tick.label, tick.position) for tick in chart.y_ticks] == [
        ("1e-4", "100.00%"),
        ("0.001", "75.00%"),
        ("0.01", "50.00%"),
        ("0.1", "25.00%"),
        ("1", "0.00%"),
    ]
    assert chart.data["levels"] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    assert run_charts({"loss": LOSSES}).main_family.charts[0].data["levels"] is None


def test_the_loss_leads_with_what_was_held_out_beside_it() -> None:
    charts = run_charts({"loss": LOSSES, "eval_loss": [(2, 0.6), (3, 0.55)], "learning_rate": LOSSES})
    (chart,) = charts.main_family.charts
    expected = [("training", False, 1), ("held out", True, 2)]
    assert [(line.label, line.held_out, line.slot) for line in chart.lines] == expected
    assert [family.slug for family in charts.families] == ["optimiser"]


def test_the_reward_leads_where_a_run_earns_one() -> None:
    charts = run_charts({"loss": LOSSES, "reward": LOSSES, "eval_reward": LOSSES})
    assert [chart.title for chart in charts.main_family.charts] == ["Reward"]
    assert [chart.title for family in charts.families for chart in family.charts] == ["Loss"]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("rewards/margins", "rewards"),
        ("reward_std", "rewards"),
        ("frac_reward_zero_std", "rewards"),
        ("logps/chosen", "distance"),
        ("kl", "distance"),
        ("log_ratio", "distance"),
        ("logits/rejected", "distance"),
        ("completions/mean_length", "answers"),
        ("valid", "answers"),
        ("clip_fraction", "updates"),
        ("value_loss", "updates"),
        ("kl_coef", "updates"),
        ("learning_rate", "optimiser"),
        ("grad_norm", "optimiser"),
        ("tokens_per_second", "speed"),
        ("runtime", "speed"),
        ("seconds_sampling", "speed"),
        ("num_tokens", "speed"),
        ("taste", "other"),
    ],
)
def test_every_figure_has_a_family(name: str, family: str) -> None:
    assert family_of(name) == family


def test_chosen_and_rejected_share_a_chart_of_one_run_and_not_of_several() -> None:
    series = {"rewards/chosen": LOSSES, "rewards/rejected": LOSSES, "eval_rewards/chosen": LOSSES}
    (family,) = run_charts(series).families
    (chart,) = family.charts
    expected = [("chosen", 1), ("chosen, held out", 1), ("rejected", 2)]
    assert [(line.label, line.slot) for line in chart.lines] == expected
    (family,) = runs_charts([("run 1", series), ("run 2", series)]).families
    assert [chart.slug for chart in family.charts] == ["rewards-chosen", "rewards-rejected"]


def test_runs_side_by_side_have_a_colour_each_and_dashes_for_what_was_held_out() -> None:
    charts = runs_charts([("run 4", {"loss": LOSSES, "eval_loss": LOSSES}), ("run 9", {"loss": LOSSES})])
    (chart,) = charts.main_family.charts
    expected = [("run 4", 1, False), ("run 4, held out", 1, True), ("run 9", 2, False)]
    assert [(line.label, line.slot, line.held_out) for line in chart.lines] == expected


def test_what_was_logged_once_is_a_number_and_no_chart() -> None:
    charts = run_charts({"loss": [(1, 0.69)], "eval_runtime": [(1, 2.0)], "epoch": LOSSES})
    assert charts.main_family.charts == []
    assert [(one.title, one.text, one.step) for one in charts.main_family.lone] == [
        ("Loss, training", "0.69", 1)
    ]
    (family,) = charts.families
    assert [one.title for one in family.lone] == ["Time of an evaluation, held out"]


def test_a_run_without_figures_has_no_charts() -> None:
    charts = run_charts({})
    assert (charts.main_family, charts.families) == (None, [])
    assert run_charts({"loss": [(1, math.nan)]}).main_family is None


def test_the_table_has_ten_steps_of_each_line_the_first_and_the_last_among_them() -> None:
    charts = run_charts(
        {"loss": [(step, step / 100) for step in range(1, 101)], "eval_loss": [(7, 0.5), (100, 0.4)]}
    )
    table = charts.main_family.table
    assert table.columns == ["Loss, training", "Loss, held out"]
    assert [step for step, _ in table.rows] == [1, 7, 12, 23, 34, 45, 56, 67, 78, 89, 100]
    assert dict(table.rows)[7] == ["0.07", "0.5"]
    assert dict(table.rows)[12] == ["0.12", ""]


NAMES = st.one_of(
    st.sampled_from(
        ["loss", "eval_loss", "rewards/chosen", "rewards/rejected", "a/b", "a-b", "a_b", "eval_"]
    ),
    st.text(max_size=8),
)
POINTS = st.dictionaries(st.integers(0, 10**9), st.floats(), max_size=5).map(lambda one: sorted(one.items()))


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(NAMES, POINTS, max_size=4))
def test_any_figures_are_drawn(series: dict[str, list[tuple[int, float]]]) -> None:
    charts = run_charts(series)
    shown = [chart for family in [charts.main_family, *charts.families] if family for chart in family.charts]
    assert len({chart.slug for chart in shown}) == len(shown)
    for chart in shown:
        places = [place for line in chart.lines for at in line.markers for place in at]
        assert all(0 <= float(place.rstrip("%")) <= 100 for place in places)
