// Follows a job: past events, new ones, and waiting for some of them.

import { setTimeout as sleep } from 'node:timers/promises';
import { infoOf } from './coordinator.js';

const RETRY_S = 0.5;

export class Watch {
  #events = [];
  #waiting = new Set();
  #call = null;
  job = null; // the coordinator's latest state of it

  constructor(coordinator, jobId, onEvent) {
    this.coordinator = coordinator;
    this.jobId = jobId;
    this.onEvent = onEvent;
  }

  /** Follow the job until its run ends. After a lost connection, continue after the last event. */
  async run() {
    while (this.job?.state !== 'JOB_STATE_FINISHED') {
      const afterSequence = this.#events.at(-1)?.sequence ?? 0;
      const status = await this.#follow({ jobId: this.jobId, afterSequence });
      if (this.job?.state === 'JOB_STATE_FINISHED' || this.coordinator.follow(infoOf(status))) continue;
      await sleep(1000 * RETRY_S);
    }
  }

  #follow(request) {
    return new Promise((resolve) => {
      this.#call = this.coordinator.jobs.watchJob(request);
      this.#call.on('data', (response) => this.#take(response));
      this.#call.on('error', () => {}); // 'status' reports every end
      this.#call.on('status', resolve);
    });
  }

  #take(response) {
    if (response.update === 'job') this.job = response.job;
    if (response.update === 'event') {
      this.#events.push(response.event);
      this.onEvent(response.event);
      for (const check of this.#waiting) check(response.event);
    }
  }

  /** Wait for the first event after `afterSequence` that meets a condition. */
  until(condition, afterSequence = 0) {
    return new Promise((resolve) => {
      const check = (event) => {
        if (event.sequence <= afterSequence || !condition(event)) return;
        this.#waiting.delete(check);
        resolve(event);
      };
      this.#waiting.add(check);
      this.#events.forEach(check);
    });
  }

  get lastSequence() {
    return this.#events.at(-1)?.sequence ?? 0;
  }
}
