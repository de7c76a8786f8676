// A replacement for GPUs and a training framework: pipelines that compute, wait and draw power.

export const CLOCKS_MHZ = [1410, 1350, 1290, 1230, 1170, 1110, 1050, 990, 930, 870, 810, 750];

const STOCK_MHZ = CLOCKS_MHZ[0]; // where an unlimited A100 runs
const BLOCKING_POWER_W = 85;
const JITTER = 0.001; // no two computations take quite the same time

// Seconds at the highest clock. A part of it, data movement, does not depend on the clock.
const FORWARD = { computeS: 0.02, memoryS: 0.004 };
const BACKWARD = { computeS: 0.042, memoryS: 0.008 };
const STAGE_WEIGHTS = [0.7, 1]; // stages are never perfectly balanced

/** Training iterations; data-parallel pipelines wait for each other at the end of each. */
export class Training {
  #slowdown = new Map();

  /** Make a pipeline slower by `factor` from now on, as a hot GPU would. */
  slow(pipeline, factor) {
    this.#slowdown.set(pipeline, factor);
  }

  /**
   * One iteration of the whole job.
   *
   * @param pipelines for each pipeline, for each stage: {order, clocksMhz}
   * @return its duration, and for each pipeline and stage {durationS, energyJ, runs, blockingPowerW}
   */
  iterate(pipelines) {
    const timetables = pipelines.map((stages, pipeline) => {
      const factor = this.#slowdown.get(pipeline) ?? 1;
      return timetable(stages.map(({ order, clocksMhz }, stage) => this.#runs(order, clocksMhz, stage, factor)));
    });
    const durationS = Math.max(...timetables.flat(2).map(({ beginS, durationS }) => beginS + durationS));
    const stages = timetables.map((stages) =>
      stages.map((runs) => {
        const busyS = runs.reduce((sum, run) => sum + run.durationS, 0);
        const energyJ = runs.reduce((sum, run) => sum + run.energyJ, BLOCKING_POWER_W * (durationS - busyS));
        return { durationS, energyJ, runs, blockingPowerW: BLOCKING_POWER_W };
      }),
    );
    return { durationS, stages };
  }

  #runs(order, clocksMhz, stage, factor) {
    return order.map((computation, i) => {
      const mhz = clocksMhz[i] || STOCK_MHZ;
      const { computeS, memoryS } = isForward(computation) ? FORWARD : BACKWARD;
      const jitter = 1 + JITTER * (2 * Math.random() - 1);
      const durationS = factor * jitter * STAGE_WEIGHTS[stage] * ((computeS * STOCK_MHZ) / mhz + memoryS);
      const powerW = 90 + 300 * (mhz / STOCK_MHZ) ** 2.5;
      return { computation, durationS, energyJ: powerW * durationS };
    });
  }
}

/**
 * When each computation begins: after the previous one on its stage, and after its input: for a forward, the same
 * microbatch's forward on the previous stage; for a backward, its backward on the next stage.
 */
function timetable(stages) {
  const endS = new Map();
  const position = stages.map(() => 0);
  const freeS = stages.map(() => 0);
  const isDone = () => position.every((at, stage) => at === stages[stage].length);
  while (!isDone()) {
    stages.forEach((runs, stage) => {
      const run = runs[position[stage]];
      if (!run) return;
      const { kind, microbatch } = run.computation;
      const from = isForward(run.computation) ? stage - 1 : stage + 1;
      const neededS = stages[from] ? endS.get(`${from} ${kind} ${microbatch}`) : 0;
      if (neededS === undefined) return; // not computed yet
      run.beginS = Math.max(freeS[stage], neededS);
      freeS[stage] = run.beginS + run.durationS;
      endS.set(`${stage} ${kind} ${microbatch}`, freeS[stage]);
      position[stage] += 1;
    });
  }
  return stages;
}

function isForward({ kind }) {
  return kind === 'COMPUTATION_KIND_FORWARD';
}
