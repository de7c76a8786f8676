"""Energies that a rank's counter does not determine, from all ranks of its stage. Pure.

Computations and waits that alternate faster than the energy counter moves leave powers of single ranks
undetermined. But the ranks of a stage, in all pipelines, do the same work at the same clock, and each reports
what its windows say about all powers together. The powers p of a rank are modelled as

    p = μ + t,   t ~ N(0, T),   μ ~ N(c g, S)

T is how much GPUs of one model differ: mostly by a common factor. c is the power of computing, from all
ranks' information; g and S say that all kinds of computations draw nearly this power, and waiting a part of
it. A rank's powers are their expectation given its own information and that of the others. What its own
windows determine stays as it is (such as the sum of forward and backward), the rest is completed.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.bounds import MAX_RANK_POWER_W, MIN_POWER_W
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import EnergyEstimate, EnergySample
from perseus.solver import Kind, round_estimate

Array = NDArray[np.float64]
KindAndChunk = tuple[Kind, int]

# Waiting draws this share of the power of computing. (The published A100 and A40: 0.36 and 0.40 of the least
# power.)
_WAITING_SHARE = 0.35
# Standard deviations of μ, as shares of the power of computing. Published forwards and backwards differ by up
# to 7 % at the same clock; those of small models may differ by more, and FIXED ones may be of any kind.
_WAITING_DEVIATION = 0.15
_KIND_DEVIATION = 0.15
_FIXED_DEVIATION = 0.5
# Standard deviations of t, as shares of each power: of the factor common to a GPU's powers, and of the rest.
_GPU_DEVIATION = 0.05
_REST_DEVIATION = 0.02
# A power with a larger standard error than this share of the power of computing is not determined, as in
# agents.
_MAX_ERROR_SHARE = 0.1
# Of a power, as a share: an error of 0.003 %, far less than GPUs differ by.
_MAX_INFORMATION = 1e9


def is_informative(estimate: EnergyEstimate, needed: Set[KindAndChunk], clock_mhz: int) -> bool:
    """Tell whether an estimate has joint information on just the needed computations at the clock."""
    samples = _joint_samples(estimate)
    return (
        bool(estimate.power_information)
        and len(samples) == len(needed)
        and all(each.clock_mhz == clock_mhz and (each.kind, each.chunk) in needed for each in samples)
    )


def complete(
    estimates: Mapping[Coordinates, EnergyEstimate], *, accepts_sums: bool
) -> dict[Coordinates, EnergyEstimate]:
    """Return those of the estimates that lack energies and can be completed from all of them.

    All are of the same work at one clock, and informative (`is_informative`). With `accepts_sums`, a power
    may be undetermined as long as the energy of all computations together is not.
    """
    lacking = [rank for rank, estimate in estimates.items() if estimate.undetermined]
    if not lacking:
        return {}
    pool = _pool([*estimates.values()])
    if pool is None:
        return {}
    found: dict[Coordinates, EnergyEstimate] = {}
    for row, (rank, estimate) in enumerate(estimates.items()):
        if estimate.undetermined:
            completed = _completed(estimate, pool, row, len(lacking), accepts_sums=accepts_sums)
            if completed is not None:
                found[rank] = completed
    return found


@dataclass(frozen=True, slots=True)
class _Pool:
    """The expected powers of each rank, shape (ranks, keys + 1), with their covariances; waiting is last.

    The keys are in the order of `_key`.
    """

    level_w: float
    powers_w: Array
    covariances_w2: Array


def _pool(estimates: Sequence[EnergyEstimate]) -> _Pool | None:
    """Return the ranks' powers, given the information of all; None if that is no information on any."""
    information, vectors = map(np.array, zip(*map(_information, estimates), strict=True))
    size = vectors.shape[1]
    typical = np.append(np.ones(size - 1), _WAITING_SHARE)
    weight = float(typical @ information.sum(axis=0) @ typical)
    level_w = float(typical @ vectors.sum(axis=0)) / weight if weight > 0 else 0.0
    if not MIN_POWER_W <= level_w <= MAX_RANK_POWER_W:
        return None
    # From here on, all powers are shares of the power of computing. Information is neither negative, as by
    # rounding, nor so much that it would drown the rest.
    values, directions = np.linalg.eigh(information * level_w**2)
    kept = values.clip(0, _MAX_INFORMATION)
    shares = np.divide(kept, values, out=np.zeros_like(kept), where=kept > 0)
    turned = directions.swapaxes(1, 2)
    information = (directions * kept[:, None, :]) @ turned
    vectors = directions @ (shares[..., None] * (turned @ vectors[..., None])) * level_w
    common = np.outer(typical, typical)
    of_gpu = _GPU_DEVIATION**2 * common + np.diag((_REST_DEVIATION * typical) ** 2)
    kinds = [sample.kind for sample in sorted(_joint_samples(estimates[0]), key=_key)]
    deviations = np.array(
        [*(_FIXED_DEVIATION if kind is Kind.FIXED else _KIND_DEVIATION for kind in kinds), _WAITING_DEVIATION]
    )
    # The power of computing itself may be off by all its size.
    precision = np.linalg.inv(common + np.diag(deviations**2))
    # Of μ: a rank's information and vector, given that its powers are t away.
    through_gpu = np.linalg.inv(np.eye(size) + information @ of_gpu)
    about, about_vectors = through_gpu @ information, through_gpu @ vectors
    others = precision + about.sum(axis=0) - about
    others_vectors = precision @ typical[:, None] + about_vectors.sum(axis=0) - about_vectors
    means = np.linalg.solve(others, others_vectors)
    before = np.linalg.inv(np.linalg.inv(others) + of_gpu)
    covariances = np.linalg.inv(information + before)
    powers = covariances @ (vectors + before @ means)
    return _Pool(level_w, powers[..., 0] * level_w, covariances * level_w**2)


def _completed(
    estimate: EnergyEstimate, pool: _Pool, row: int, completed_count: int, *, accepts_sums: bool
) -> EnergyEstimate | None:
    """Return an estimate with all energies; None if they are not determined."""
    powers_w, covariance_w2 = pool.powers_w[row], pool.covariances_w2[row]
    errors_w = np.sqrt(np.diagonal(covariance_w2))
    is_determined = errors_w <= _MAX_ERROR_SHARE * pool.level_w
    samples = sorted(_joint_samples(estimate), key=_key)
    times_s = np.array([sample.computation_count * sample.time_s for sample in samples])
    if not np.all((powers_w[:-1] > 0) & (powers_w[:-1] <= MAX_RANK_POWER_W)):
        return None
    if not is_determined[:-1].all():
        error_j = float(np.sqrt(times_s @ covariance_w2[:-1, :-1] @ times_s))
        if not accepts_sums or error_j > _MAX_ERROR_SHARE * float(times_s @ powers_w[:-1]):
            return None
    # What is completed in several ranks rests on the same information: its errors don't average out.
    errors_w *= completed_count**0.5
    power_w = estimate.blocking_power_w, estimate.blocking_power_se_w
    if power_w[0] is None and is_determined[-1] and powers_w[-1] >= MIN_POWER_W:
        power_w = round_estimate(powers_w[-1]), round_estimate(errors_w[-1])
    return replace(
        estimate,
        samples=tuple(
            replace(
                sample,
                energy_j=round_estimate(power * sample.time_s),
                energy_se_j=round_estimate(np.hypot(error * sample.time_s, power * sample.time_se_s)),
            )
            for sample, power, error in zip(samples, powers_w.tolist(), errors_w.tolist(), strict=False)
        ),
        blocking_power_w=power_w[0],
        blocking_power_se_w=power_w[1],
        undetermined=(),
        power_information=(),
        power_information_vector=(),
    )


def _information(estimate: EnergyEstimate) -> tuple[Array, Array]:
    """Return the information on an estimate's powers, and its vector; the keys in the order of `_key`."""
    samples = _joint_samples(estimate)
    rows = np.array([*sorted(range(len(samples)), key=lambda row: _key(samples[row])), len(samples)])
    lower = np.zeros((len(rows), len(rows)))
    lower[np.tril_indices(len(rows))] = estimate.power_information
    matrix = lower + np.tril(lower, -1).T
    return matrix[np.ix_(rows, rows)], np.array(estimate.power_information_vector)[rows]


def _joint_samples(estimate: EnergyEstimate) -> tuple[EnergySample, ...]:
    return estimate.samples + estimate.undetermined


def _key(sample: EnergySample) -> tuple[str, int]:
    return sample.kind.value, sample.chunk
