// One rank in its agent: clocks in force, pending offer, measurements. No network, no clock.
//
// docs/protocol.md has the rules; the numbers in the comments are those of its section "Offers".

const STOCK_MHZ = 0;

/** The state before the first plan. Epoch and version identify a plan. */
const NO_PLAN = { epoch: '', version: 0, clocks: { stock: {} } };

export class Rank {
  #order = null;
  #inForce = NO_PLAN;
  #pending = null;
  #measured = new Measured();

  /**
   * @param place {pipeline, stage, tensor}
   * @param gpu as RankJoined has it
   * @param afterSequence the number of the last batch that is not of this training process
   */
  constructor(jobId, place, gpu, afterSequence = 0) {
    this.jobId = jobId;
    this.place = place;
    this.gpu = gpu;
    this.afterSequence = afterSequence;
    this.isAccepted = false;
    this.iteration = -1; // the highest that has begun
  }

  /** The rank's state for every new stream. */
  joined() {
    const { epoch, version } = this.#inForce;
    return this.#message({
      gpu: this.gpu,
      iteration: this.iteration,
      inForceEpoch: epoch,
      inForceVersion: version,
      afterSequence: this.afterSequence,
    });
  }

  /** The coordinator has accepted the rank; `order`: its computations in every iteration. */
  accept(order) {
    if (this.#order && JSON.stringify(order) !== JSON.stringify(this.#order)) this.dropPlans();
    this.#order = order;
    this.isAccepted = true;
  }

  /** The stream has ended. Plans stay while the lease runs. */
  disconnect() {
    this.isAccepted = false;
  }

  /** Consider an offer; returns the PlanAnswer that every offer gets (rule 1). */
  consider(offer) {
    const refusal = this.#refusal(offer);
    if (!refusal) {
      this.#pending = isSame(offer, this.#inForce) ? null : offer; // rule 2: the latest offer counts
    }
    return this.#message({
      epoch: offer.epoch,
      version: offer.version,
      accepted: !refusal,
      iteration: this.iteration,
      ...refusal,
    });
  }

  #refusal(offer) {
    const refuse = (reason, message, refusedClocksMhz = []) => ({
      refusalReason: `PLAN_REFUSAL_REASON_${reason}`,
      message,
      refusedClocksMhz,
    });
    if (!this.isAccepted) return refuse('UNKNOWN_RANK', 'the rank is not accepted yet');
    const computations = offer.stagePlan?.computations;
    if (computations && !isSameOrder(computations, this.#order)) {
      return refuse('ORDER_MISMATCH', 'the computations are not those of the order');
    }
    const foreign = clocksOf(offer, this.#order).filter(
      (mhz) => mhz !== STOCK_MHZ && !this.gpu.supportedClocksMhz.includes(mhz),
    );
    if (foreign.length) {
      return refuse('CLOCK_NOT_SUPPORTED', `no such clocks: ${foreign}`, [...new Set(foreign)]);
    }
    if (offer.startIteration <= this.iteration && !isSame(offer, this.#inForce)) {
      return refuse('PAST_START', `iteration ${this.iteration} has begun`); // rule 4
    }
    return null;
  }

  /** Begin an iteration; return the PlanInForce to send if it brings the pending plan into force (rule 3). */
  begin(iteration) {
    this.iteration = iteration;
    if (!this.#pending || iteration < this.#pending.startIteration) return null;
    this.#follow(this.#pending);
    return this.#inForceMessage(iteration);
  }

  /** Go to stock at once: the lease has expired, or the rank was refused. Return a PlanInForce if that is a change. */
  dropPlans() {
    this.#pending = null;
    if (this.#inForce === NO_PLAN) return null;
    this.#follow(NO_PLAN);
    return this.#inForceMessage(this.iteration + 1);
  }

  #follow(plan) {
    this.#inForce = plan;
    this.#pending = null;
    this.#measured = new Measured();
  }

  /** The rank's computations in an iteration, and the clock of each, MHz; 0 for stock. */
  get work() {
    return { order: this.#order, clocksMhz: clocksOf(this.#inForce, this.#order) };
  }

  /**
   * A regular iteration has ended; returns its telemetry, without a sequence.
   *
   * @param runs one for each computation of the order: {beginS, durationS, energyJ}
   * @param blockingPowerW power while the rank waits, undefined where that is not known
   */
  end({ durationS, energyJ, runs, blockingPowerW }) {
    const { iteration } = this;
    const { clocksMhz } = this.work;
    const column = (of) => this.#order.map(of);
    this.#measured.add(this.#order, clocksMhz, runs);
    return this.#message({
      iterations: {
        iteration: [iteration],
        planVersion: [this.#inForce.version],
        durationS: [durationS],
        energyJ: [energyJ],
        isRegular: [true],
        clockEventReasons: [0],
      },
      computations: {
        iteration: column(() => iteration),
        kind: column((computation) => computation.kind),
        microbatch: column((computation) => computation.microbatch),
        chunk: column((computation) => computation.chunk),
        beginS: column((_, i) => runs[i].beginS),
        durationS: column((_, i) => runs[i].durationS),
        clockMhz: clocksMhz,
      },
      energy: {
        planVersion: this.#inForce.version,
        iterationCount: this.#measured.iterationCount,
        samples: this.#measured.samples(),
        blockingPowerW, // omitted if undefined: unknown, never 0
      },
    });
  }

  #inForceMessage(iteration) {
    const { epoch, version } = this.#inForce;
    return this.#message({ epoch, version, iteration });
  }

  #message(fields) {
    return { jobId: this.jobId, rank: this.place, ...fields };
  }
}

/**
 * Time and energy of each kind of computation at each clock, since a plan came into force.
 *
 * A real agent can't read a computation's energy from the counter, which is updated only every 20 to 100 ms: it
 * runs a regression over the counter's windows, and sends standard errors. Emulated GPUs return it directly.
 */
class Measured {
  iterationCount = 0;
  #byKey = new Map();

  add(order, clocksMhz, runs) {
    this.iterationCount += 1;
    order.forEach(({ kind, chunk }, i) => {
      const key = `${kind} ${chunk} ${clocksMhz[i]}`;
      if (!this.#byKey.has(key)) {
        this.#byKey.set(key, { kind, chunk, clockMhz: clocksMhz[i], timesS: [], energiesJ: [] });
      }
      this.#byKey.get(key).timesS.push(runs[i].durationS);
      this.#byKey.get(key).energiesJ.push(runs[i].energyJ);
    });
  }

  samples() {
    return [...this.#byKey.values()].map(({ timesS, energiesJ, ...key }) => ({
      ...key,
      computationCount: timesS.length,
      timeS: mean(timesS),
      timeSeS: standardError(timesS),
      energyJ: mean(energiesJ),
      energySeJ: standardError(energiesJ),
    }));
  }
}

function clocksOf({ stagePlan, hold }, order) {
  if (hold) return order.map(() => hold.clockMhz);
  if (!stagePlan) return order.map(() => STOCK_MHZ);
  const planned = stagePlan.computations.map((computation) => computation.clockMhz);
  // A clock of 0 means independent of the clock (FIXED): use the next computation's, so that it is set in time.
  return planned.map((_, i) => [...planned.slice(i), ...planned].find((mhz) => mhz > 0) ?? STOCK_MHZ);
}

function isSame(one, other) {
  return one.epoch === other.epoch && one.version === other.version;
}

function isSameOrder(computations, order) {
  return (
    computations.length === order.length &&
    order.every(({ kind, microbatch, chunk }, i) => {
      const other = computations[i];
      return other.kind === kind && other.microbatch === microbatch && other.chunk === chunk;
    })
  );
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function standardError(values) {
  if (values.length < 2) return 0;
  const middle = mean(values);
  const squares = values.reduce((sum, value) => sum + (value - middle) ** 2, 0);
  return Math.sqrt(squares / (values.length - 1) / values.length);
}
