// A training job of 2 pipelines × 2 stages on emulated GPUs, from its registration to its report.
//
//     node main.js [host:port]
//
// With PERSEUS_SPEED=5 iterations take a fifth of the time that they report.

import { randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { Agent } from './agent.js';
import { Coordinator } from './coordinator.js';
import { serving, services } from './introspection.js';
import { Rank } from './rank.js';
import { CLOCKS_MHZ, Training } from './training.js';
import { Watch } from './watch.js';

const target = process.argv[2] ?? '127.0.0.1:50051';
const speed = Number(process.env.PERSEUS_SPEED ?? 1);
const jobId = process.env.PERSEUS_JOB ?? 'nodejs';
const PIPELINES = [0, 1];
const STAGES = [0, 1];
const SLOW = 1; // the pipeline that will be slow
const SLOWDOWN = 1.25;

const coordinator = new Coordinator(target);
const log = (line) => console.log(line);

log(`serving: ${await serving(target, 'perseus.v1.AgentService')}`);
log(`services: ${(await services(target)).join(' ')}`);

const registration = {
  requestId: randomUUID(), // one for each started training, the same in every retry
  spec: {
    jobId,
    parallelism: { pipelineCount: PIPELINES.length, stageCount: STAGES.length, tensorCount: 1 },
    schedule: { named: { name: 'SCHEDULE_NAME_ONE_FORWARD_ONE_BACKWARD', microbatchCount: 4 } },
  },
};
const register = () => coordinator.call('registerJob', registration);
await register();

const watch = new Watch(coordinator, jobId, ({ type, message, details }) => {
  log(`event ${type.replace('JOB_EVENT_TYPE_', '')} [${details ?? ''}]: ${message}`);
});
const watching = watch.run();

const agent = new Agent(coordinator, { onJobUnknown: register, log });
const running = agent.run();

const ranks = PIPELINES.map((pipeline) => STAGES.map((stage) => emulatedRank(pipeline, stage)));
ranks.flat().forEach((rank) => agent.serve(rank));
while (!agent.areAllAccepted) await sleep(10);

const training = new Training();
let isTraining = true;
const trained = train();

// Baseline, profiling and solving happen automatically. Then every pipeline has a plan in force.
const planned = await Promise.all(PIPELINES.map((pipeline) => inForce(pipeline, (plan) => plan)));
const fastestS = Math.max(...planned.map(({ pipelineClocks }) => pipelineClocks.plan.iterationTimeS));
log(`planned: ${fastestS.toFixed(4)} s`);

// A pipeline gets slow, and the operator's own monitoring sees it first: the other can be as slow, and save energy.
let since = watch.lastSequence;
training.slow(SLOW, SLOWDOWN);
await coordinator.call('reportStraggler', { jobId, pipeline: SLOW, slowdownFactor: SLOWDOWN });
const answered = await inForce(0, (plan) => plan.iterationTimeS > 1.02 * fastestS, since);
log(`answered: ${answered.pipelineClocks.plan.iterationTimeS.toFixed(4)} s`);
await iterations(5);

since = watch.lastSequence;
training.slow(SLOW, 1);
await coordinator.call('clearStraggler', { jobId, pipeline: SLOW });
await inForce(0, (plan) => plan.iterationTimeS < 1.02 * fastestS, since);
log('recovered');
await iterations(5);

isTraining = false;
await trained;
const { periods } = await coordinator.call('getReport', { jobId });
for (const { state, iterationTimeS, energyJ, saving } of periods.filter((period) => period.saving)) {
  const figures = `${iterationTimeS.toFixed(4)} s, ${energyJ.toFixed(1)} J`;
  log(`report ${state.replace('JOB_STATE_', '')}: ${figures}, saving ${saving.energyPercent.toFixed(1)} %`);
}

await agent.close();
await running;
await watching;
log(`job ${watch.job.state}`);
coordinator.close();

function emulatedRank(pipeline, stage) {
  const gpu = { uuid: `GPU-${jobId}-${pipeline}-${stage}`, model: 'emulated', supportedClocksMhz: CLOCKS_MHZ };
  return new Rank(jobId, { pipeline, stage, tensor: 0 }, gpu);
}

/** Run iterations, all ranks together. */
async function train() {
  for (let iteration = 0; isTraining; iteration += 1) {
    for (const rank of ranks.flat()) agent.tellInForce(rank.begin(iteration));
    const { durationS, stages } = training.iterate(ranks.map((own) => own.map(({ work }) => work)));
    await sleep((1000 * durationS) / speed);
    ranks.forEach((own, pipeline) => {
      own.forEach((rank, stage) => agent.report(rank.end(stages[pipeline][stage])));
    });
  }
}

/** Wait for a number of iterations. */
async function iterations(count) {
  const last = ranks[0][0].iteration + count;
  while (ranks[0][0].iteration < last) await sleep(10);
}

/** Wait for the event that a plan that meets a condition is in force on all ranks of a pipeline. */
function inForce(pipeline, condition, afterSequence = 0) {
  return watch.until(({ type, pipelineClocks }) => {
    if (type !== 'JOB_EVENT_TYPE_PLAN_IN_FORCE' || pipelineClocks.pipeline !== pipeline) return false;
    return pipelineClocks.clocks === 'plan' && condition(pipelineClocks.plan);
  }, afterSequence);
}
