"""The guard: withdraws plans that are surely slower than promised. Part of the state machine.

It judges by stock beside the plans (`stock_blocks`), whatever was predicted and however noisy the profile is.
The promise is the policy's: no slower than stock, or within a slowdown; where plans are meant to be slower (a
deadline, power, a signal) it is their prediction. `guard_tolerance` comes on top, and never grows.

The evidence accumulates from pair to pair, and looking at it after each must not raise the false alarms: the
n-th look spends the share 1 / n (n + 1) of `FALSE_ALARMS`, which is 1 in all. Until there are enough pairs to
know how much they scatter, a plan has to be slower than stock on both sides of a block.
"""

from dataclasses import dataclass

from perseus.service.domain.measured import MIN_PAIRS
from perseus.service.domain.pairs import Pair, PairSums
from perseus.service.job.rules import Rules

FALSE_ALARMS = 0.02
"""Share of plans that keep their promise and are withdrawn all the same, at most."""


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


def proof_of_slowdown(pair: Pair, pairs: PairSums, promised: float, rules: Rules) -> SlowdownProof | None:
    """Return the proof that plans take more than `promised` × stock's time, if there is one.

    `pairs` includes the latest `pair`.
    """
    count = pairs.count
    confidence = 1 - 2 * FALSE_ALARMS / (count * (count + 1))  # of an interval, of which one side counts
    ratio = pairs.ratio
    if count < MIN_PAIRS:
        surely = pair.min_ratio(confidence)
    else:
        margin = pairs.ratio_margin(confidence)
        assert margin is not None
        surely = ratio - margin
    if surely <= promised * (1 + rules.guard_tolerance):
        return None
    return SlowdownProof(ratio, surely, promised, pair, count)
