"""Pure statistics: intervals and paired comparisons, sequential tests, off-policy estimators."""

from rl.statistics.concordance import Ranking as Ranking
from rl.statistics.concordance import concordance as concordance
from rl.statistics.intervals import Difference as Difference
from rl.statistics.intervals import Interval as Interval
from rl.statistics.intervals import calibration_curve as calibration_curve
from rl.statistics.intervals import expected_calibration_error as expected_calibration_error
from rl.statistics.intervals import mcnemar_exact as mcnemar_exact
from rl.statistics.intervals import mcnemar_unconditional as mcnemar_unconditional
from rl.statistics.intervals import mean_interval as mean_interval
from rl.statistics.intervals import not_inferior_p as not_inferior_p
from rl.statistics.intervals import paired_difference as paired_difference
from rl.statistics.intervals import wilson_interval as wilson_interval
