// The rules of offers, as docs/protocol.md numbers them. `npm test`

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Rank } from './rank.js';

const FORWARD = { kind: 'COMPUTATION_KIND_FORWARD', microbatch: 0, chunk: 0 };
const BACKWARD = { kind: 'COMPUTATION_KIND_BACKWARD', microbatch: 0, chunk: 0 };
const FIXED = { kind: 'COMPUTATION_KIND_FIXED', microbatch: 0, chunk: 0 };

function acceptedRank(order = [FORWARD, BACKWARD]) {
  const gpu = { uuid: 'GPU-0', model: 'emulated', supportedClocksMhz: [1400, 1200, 1000] };
  const rank = new Rank('job', { pipeline: 0, stage: 0, tensor: 0 }, gpu);
  rank.accept(order);
  return rank;
}

function offer(version, startIteration, clocks) {
  return { epoch: 'e', version, startIteration, ...clocks };
}

const hold = (clockMhz) => ({ hold: { clockMhz } });

test('a pending plan comes into force at its start, and is reported only then', () => {
  const rank = acceptedRank();
  assert.equal(rank.consider(offer(1, 3, hold(1200))).accepted, true);
  assert.equal(rank.begin(2), null);
  assert.deepEqual(rank.work.clocksMhz, [0, 0]);
  const { epoch, version, iteration } = rank.begin(3);
  assert.deepEqual({ epoch, version, iteration }, { epoch: 'e', version: 1, iteration: 3 });
  assert.deepEqual(rank.work.clocksMhz, [1200, 1200]);
});

test('a newer offer replaces the pending one, and a refused one changes nothing', () => {
  const rank = acceptedRank();
  rank.consider(offer(1, 3, hold(1200)));
  rank.consider(offer(2, 4, hold(1000)));
  assert.equal(rank.consider(offer(3, 4, hold(1111))).refusalReason, 'PLAN_REFUSAL_REASON_CLOCK_NOT_SUPPORTED');
  assert.equal(rank.begin(3), null);
  assert.equal(rank.begin(4).version, 2);
});

test('an offer whose start has begun is refused, unless it is in force already', () => {
  const rank = acceptedRank();
  rank.consider(offer(1, 2, hold(1200)));
  rank.begin(2);
  assert.equal(rank.consider(offer(1, 2, hold(1200))).accepted, true);
  assert.equal(rank.begin(3), null);
  const answer = rank.consider(offer(2, 3, hold(1000)));
  assert.equal(answer.refusalReason, 'PLAN_REFUSAL_REASON_PAST_START');
  assert.equal(answer.iteration, 3);
});

test('the same version in another epoch is another plan', () => {
  const rank = acceptedRank();
  rank.consider(offer(1, 0, hold(1200)));
  rank.begin(0);
  rank.consider({ ...offer(1, 1, hold(1000)), epoch: 'f' });
  assert.equal(rank.begin(1).epoch, 'f');
});

test('a computation that no clock changes has the clock of the next one', () => {
  const rank = acceptedRank([FIXED, FORWARD, BACKWARD, { ...FIXED, microbatch: 1 }]);
  const computations = [
    { ...FIXED, clockMhz: 0 },
    { ...FORWARD, clockMhz: 1400 },
    { ...BACKWARD, clockMhz: 1000 },
    { ...FIXED, microbatch: 1, clockMhz: 0 },
  ];
  assert.equal(rank.consider(offer(1, 0, { stagePlan: { computations } })).accepted, true);
  rank.begin(0);
  assert.deepEqual(rank.work.clocksMhz, [1400, 1400, 1000, 1400]);
});

test('computations that differ from the order are refused', () => {
  const computations = [{ ...BACKWARD, clockMhz: 1000 }];
  const answer = acceptedRank().consider(offer(1, 0, { stagePlan: { computations } }));
  assert.equal(answer.refusalReason, 'PLAN_REFUSAL_REASON_ORDER_MISMATCH');
});

test('without a message for a whole lease there is no plan', () => {
  const rank = acceptedRank();
  rank.consider(offer(1, 0, hold(1200)));
  rank.begin(0);
  const { epoch, version, iteration } = rank.dropPlans();
  assert.deepEqual({ epoch, version, iteration }, { epoch: '', version: 0, iteration: 1 });
  assert.equal(rank.dropPlans(), null);
  assert.equal(rank.joined().inForceVersion, 0);
});
