"""The guard: withdraws plans that are surely slower than promised. Part of the state machine.

It judges by stock beside the plans (`stock_blocks`), whatever was predicted and however noisy the profile is.
The promise is the policy's: no slower than stock, or within a slowdown; where plans are meant to be slower (a
deadline, power, a signal) it is their prediction. `guard_tolerance` comes on top, and never grows.

Evidence is sought in three ways: in all pairs, in the latest ones (a plan that becomes slow after a good week
must not live on that), and within the latest alone, where both sides have to be slower than the block between
them. Looking again after each pair must not raise the false alarms: the n-th look spends the share
1 / n (n + 1) of `FALSE_ALARMS`, which is 1 in all.
"""

from collections import deque
from dataclasses import dataclass

from perseus.service.domain.measured import MIN_PAIRS, Period
from perseus.service.domain.pairs import NO_PAIRS, Pair, PairSums
from perseus.service.job.planning.stock_blocks import EARLY_COUNT
from perseus.service.job.rules import Rules

FALSE_ALARMS = 0.02
"""Share of plans that keep their promise and are withdrawn all the same, at most."""

_LATEST_COUNT = 8


@dataclass(frozen=True, slots=True)
class SlowdownProof:
    """Plans that are surely slower than promised: ratios of iteration times to stock beside them.

    `surely` is the bound that the ratio exceeds, and `pair` the latest one.
    """

    ratio: float
    surely: float
    promised: float
    pair: Pair
    pair_count: int


DECISION_S = 3600.0
"""Time under plans after which it has to be known whether they keep their promise."""


class Guard:
    """Watches the pairs of the plans in force."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._latest: deque[Pair] = deque(maxlen=_LATEST_COUNT)
        self._versions: tuple[int, ...] | None = None

    def judge(
        self, pair: Pair, pairs: PairSums, promised: float, versions: tuple[int, ...] | None
    ) -> SlowdownProof | None:
        """Take a pair; return the proof that plans take more than `promised` × stock's time, if there is one.

        `pairs`: the sums over all pairs of the plans of these `versions`, with this one.
        """
        count = pairs.count
        if versions != self._versions:
            self._versions = versions
            self._latest.clear()
        self._latest.append(pair)
        latest = NO_PAIRS
        for each in self._latest:
            latest = latest.with_pair(each.planned_time_s, each.stock_time_s)
        # Of intervals, of which one side counts.
        confidence = 1 - 2 * FALSE_ALARMS / 3 / (count * (count + 1))
        proofs = [(pair.planned_time_s / pair.stock_time_s, pair.min_ratio(confidence))]
        for sums in (latest, pairs):
            margin = sums.ratio_margin(confidence)
            if sums.count >= MIN_PAIRS and margin is not None:
                proofs.append((sums.ratio, sums.ratio - margin))
        ratio, surely = max(proofs, key=lambda proof: proof[1])
        if surely <= promised * (1 + self._rules.guard_tolerance):
            return None
        return SlowdownProof(ratio, surely, promised, pair, count)

    def undecided_margin(self, period: Period, promised: float) -> float | None:
        """Return the ratio's margin if it is too large to tell, by now, whether plans keep their promise."""
        pairs, tolerance = period.time_pairs, self._rules.guard_tolerance
        margin = pairs.ratio_margin()
        if (
            margin is None
            or pairs.count < EARLY_COUNT
            or period.end_time_s - period.start_time_s < DECISION_S
        ):
            return None
        is_kept = pairs.ratio + margin <= promised * (1 + tolerance)
        return None if is_kept or margin <= tolerance else margin
