// The agent: one stream to the coordinator, kept open, with its ranks' messages.

import { randomUUID } from 'node:crypto';
import { hostname } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';
import { infoOf } from './coordinator.js';

const PROTOCOL_VERSION = 1;
const FIRST_DELAY_S = 0.25;
const LONGEST_DELAY_S = 15;
const JOIN_AGAIN_S = 1;
const TICK_S = 0.25;
// Reconnecting would not help: the agent has a bug, or another stream has taken over.
const PERMANENT = new Set(['HELLO_EXPECTED', 'HELLO_REPEATED', 'INVALID_FIELD', 'STREAM_REPLACED']);
// Time, or a registration, may resolve these.
const JOIN_AGAIN = new Set(['JOB_NOT_FOUND', 'RANK_ALREADY_SERVED', 'GPU_ALREADY_SERVED', 'SPEC_MISMATCH']);
const KEPT_BATCHES = 4096;
const GATHERING_S = 0.005;
const MAX_BUNDLED = 256; // messages in a bundle
const LARGEST_BYTES = 4096; // more than any message of this agent
const WINDOW = 64; // batches under way, not yet acknowledged

export class Agent {
  #instanceId = randomUUID();
  #ranks = new Map();
  #call = null; // the stream that is open, or being opened
  #stream = null; // the same once it is welcome
  #openedAtS = 0;
  #heardAtS = 0;
  #saidAtS = 0;
  #leaseS = 30; // until the coordinator sends its own
  #telemetry = new TelemetryRing();
  #waiting = []; // messages that are sent together
  #maxBundleBytes = 0; // none until the coordinator takes some
  #refusal = null; // of a rank whose job is served elsewhere
  #isClosing = false;

  /** @param onJobUnknown called with a job's identifier if the coordinator does not know it (any more) */
  constructor(coordinator, { onJobUnknown, log = console.log }) {
    this.coordinator = coordinator;
    this.onJobUnknown = onJobUnknown;
    this.log = log;
  }

  /** Keep a stream open until `close`. */
  async run() {
    const ticking = setInterval(() => this.#tick(), 1000 * TICK_S);
    let maxDelayS = FIRST_DELAY_S;
    while (!this.#isClosing) {
      const { wasWelcome, status } = await this.#connect();
      if (this.#isClosing) break;
      const info = this.#refusal ?? infoOf(status);
      const { reason } = info;
      this.#refusal = null;
      this.log(`stream ended: ${status.code} ${reason || status.details}`);
      if (this.coordinator.follow(info)) continue;
      if (PERMANENT.has(reason)) throw new Error(`the coordinator ended the stream for good: ${status.details}`);
      if (wasWelcome) maxDelayS = FIRST_DELAY_S;
      await sleep(1000 * Math.random() * maxDelayS); // full jitter: agents must not come back all at once
      maxDelayS = Math.min(2 * maxDelayS, LONGEST_DELAY_S);
    }
    clearInterval(ticking);
  }

  /** Serve a rank from now on. */
  serve(rank) {
    rank.afterSequence = this.#telemetry.sequence;
    this.#ranks.set(keyOf(rank.jobId, rank.place), rank);
    this.#send({ rankJoined: rank.joined() });
  }

  /** A rank's training process has finished an iteration. */
  report(batch) {
    this.#telemetry.append(batch);
    this.#pump();
  }

  /** A rank's clocks in force have changed. */
  tellInForce(planInForce) {
    if (planInForce) this.#send({ planInForce });
  }

  get areAllAccepted() {
    return [...this.#ranks.values()].every((rank) => rank.isAccepted);
  }

  /** Once everything is acknowledged, let every rank leave and end the stream. */
  async close() {
    while (this.#telemetry.isWaiting) await sleep(10);
    this.#isClosing = true;
    for (const { jobId, place } of this.#ranks.values()) {
      this.#send({ rankLeft: { jobId, rank: place, reason: 'RANK_LEFT_REASON_FINISHED' } });
    }
    this.#send({ goodbye: { reason: 'training is done' } });
    this.#flush();
    this.#stream?.end();
  }

  /** Open a stream and serve it to its end. */
  #connect() {
    return new Promise((resolve) => {
      const call = this.coordinator.agents.connect(); // no deadline
      this.#call = call;
      this.#openedAtS = nowS();
      call.on('data', (response) => {
        this.#heardAtS = nowS();
        if (response.message === 'welcome') this.#welcome(call, response.welcome);
        else this.#receive(response);
      });
      call.on('error', () => {}); // 'status' reports every end
      call.on('status', (status) => {
        const wasWelcome = this.#stream !== null;
        this.#call = this.#stream = null;
        for (const rank of this.#ranks.values()) rank.disconnect();
        resolve({ wasWelcome, status });
      });
      const hello = { instanceId: this.#instanceId, agentVersion: 'nodejs', hostname: hostname() };
      call.write({ hello: { ...hello, protocolVersion: PROTOCOL_VERSION } });
    });
  }

  #welcome(call, { epoch, leaseS, acknowledgedSequence, protocolVersion, maxBundleBytes }) {
    this.log(`connected: epoch ${epoch}, protocol version ${protocolVersion || 1}`);
    this.#stream = call;
    this.#waiting = [];
    this.#maxBundleBytes = maxBundleBytes;
    this.#leaseS = leaseS;
    for (const rank of this.#ranks.values()) this.#send({ rankJoined: rank.joined() });
    this.#telemetry.rewind(acknowledgedSequence);
    this.#pump();
  }

  /** Handle the coordinator's messages, by the rules of docs/protocol.md. */
  #receive(response) {
    const body = response[response.message];
    const rank = body?.rank && this.#ranks.get(keyOf(body.jobId, body.rank));
    switch (response.message) {
      case 'rankAccepted':
        rank?.accept(body.order.computations);
        break;
      case 'rankRefused':
        this.#onRankRefused(rank, body);
        break;
      case 'planOffer':
        if (rank) this.#send({ planAnswer: this.#answer(rank, body) });
        break;
      case 'telemetryAck':
        this.#telemetry.acknowledge(body.sequence);
        this.#pump();
        break;
      case 'telemetryRefused':
        this.log(`batch ${body.sequence} refused: ${said(body)}`);
        this.#telemetry.refuse(body.sequence);
        break;
      case 'messageRefused':
        this.log(`message refused: ${said(body)}`);
        break;
      case 'drain':
        this.log(`the coordinator stops: ${body.reason}`);
        break;
      case 'heartbeat':
        break;
      default: // a message of a newer protocol
        this.log('refused an unknown message');
        this.#send({ messageRefused: { reason: 'UNKNOWN_MESSAGE', expected: 'a known message' } });
    }
  }

  #answer(rank, offer) {
    const answer = rank.consider(offer);
    if (!answer.accepted) this.log(`version ${offer.version} refused: ${answer.refusalReason}`);
    return answer;
  }

  /** A refused rank has no plan; it may be accepted later. */
  #onRankRefused(rank, { jobId, reason, message, metadata }) {
    this.log(`rank refused: ${reason}: ${message}`);
    if (!rank) return;
    this.tellInForce(rank.dropPlans());
    if (reason === 'JOB_NOT_FOUND') this.onJobUnknown(jobId);
    if (reason === 'SERVED_ELSEWHERE') {
      this.#refusal = { reason, metadata };
      this.#call.cancel();
    }
    if (!JOIN_AGAIN.has(reason)) return;
    setTimeout(() => this.#send({ rankJoined: rank.joined() }), 1000 * JOIN_AGAIN_S).unref();
  }

  /** Send a heartbeat every third of the lease; after a whole lease without one from the coordinator, go to stock. */
  #tick() {
    const now = nowS();
    if (now - this.#saidAtS > this.#leaseS / 3) {
      this.#saidAtS = now;
      this.#send({ heartbeat: {} });
    }
    if (now - this.#heardAtS > this.#leaseS) {
      for (const rank of this.#ranks.values()) this.tellInForce(rank.dropPlans());
      if (now - this.#openedAtS > this.#leaseS) this.#call?.cancel(); // dead, whatever TCP says
    }
  }

  #pump() {
    if (!this.#stream) return;
    for (const telemetry of this.#telemetry.sendable()) this.#send({ telemetry });
  }

  /** Send a message soon, with others. Drop it without a stream: a new stream begins with the current state. */
  #send(request) {
    if (!this.#stream) return;
    if (this.#waiting.push(request) === 1) setTimeout(() => this.#flush(), 1000 * GATHERING_S);
  }

  /** Send what waits, as bundles if the coordinator takes them. */
  #flush() {
    const count = Math.max(1, Math.min(MAX_BUNDLED, Math.floor(this.#maxBundleBytes / LARGEST_BYTES)));
    while (this.#stream && this.#waiting.length) {
      const messages = this.#waiting.splice(0, count);
      this.#stream.write(messages.length > 1 ? { bundle: { messages } } : messages[0]);
    }
  }
}

/** Unacknowledged batches of telemetry: numbered from 1, sent in order, resent if necessary. */
class TelemetryRing {
  sequence = 0;
  #batches = [];
  #sentSequence = 0;
  #droppedCount = 0;

  get isWaiting() {
    return this.#batches.length > 0;
  }

  append(batch) {
    this.sequence += 1;
    if (this.#batches.length === KEPT_BATCHES) {
      this.#batches.shift();
      this.#droppedCount += 1;
    }
    this.#batches.push({ ...batch, sequence: this.sequence });
  }

  sendable() {
    const waiting = this.#batches.slice(0, WINDOW).filter(({ sequence }) => sequence > this.#sentSequence);
    this.#sentSequence = waiting.at(-1)?.sequence ?? this.#sentSequence;
    return waiting.map((batch) => ({ ...batch, droppedBatchCount: this.#droppedCount }));
  }

  acknowledge(upTo) {
    this.#batches = this.#batches.filter(({ sequence }) => sequence > upTo);
  }

  refuse(refused) {
    this.#batches = this.#batches.filter(({ sequence }) => sequence !== refused);
    this.#droppedCount += 1;
  }

  rewind(acknowledged) {
    this.acknowledge(acknowledged);
    this.#sentSequence = 0;
  }
}

/** A clock that never goes back. */
function nowS() {
  return performance.now() / 1000;
}

function keyOf(jobId, { pipeline, stage, tensor }) {
  return `${jobId} ${pipeline} ${stage} ${tensor}`;
}

function said({ reason, field, expected, found }) {
  return `${reason} ${field}: expected ${expected}, found ${found}`;
}
