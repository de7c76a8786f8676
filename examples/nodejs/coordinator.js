// The coordinator's services, from the contract, and its errors.

import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { setTimeout as sleep } from 'node:timers/promises';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';
import protobuf from 'protobufjs';

const PROTOS = process.env.PERSEUS_PROTOS ?? fileURLToPath(new URL('../../protos', import.meta.url));
const DEADLINE_S = 5;
const RETRY_S = 0.5;
const MAX_HOPS = 2;
// The call's result is unknown: the coordinator is absent, restarting or busy.
const RETRIED = new Set([grpc.status.UNAVAILABLE, grpc.status.DEADLINE_EXCEEDED]);

const { perseus } = grpc.loadPackageDefinition(
  protoLoader.loadSync(['agent_service', 'job_service'].map((name) => `perseus/v1/${name}.proto`), {
    includeDirs: [PROTOS],
    longs: Number, // iterations, versions and sequences stay below 2^53
    enums: String,
    defaults: true,
    oneofs: true, // a field named like the oneof says which one is set
  }),
);

/** TLS with the environment's files (a certificate and key of your own for mutual TLS); plaintext without a CA. */
export function credentials(environment = process.env) {
  const { PERSEUS_TLS_CA: ca, PERSEUS_TLS_KEY: key, PERSEUS_TLS_CERTIFICATE: certificate } = environment;
  if (!ca) return grpc.credentials.createInsecure();
  const own = key ? [readFileSync(key), readFileSync(certificate)] : [];
  return grpc.credentials.createSsl(readFileSync(ca), ...own);
}

/** Clients of the services at `target` (host:port), or at another coordinator of its fleet that serves the job. */
export class Coordinator {
  #target;
  #clients = new Map(); // by address
  #hopCount = 0;

  constructor(target) {
    this.#target = target;
    this.#go(target);
  }

  #go(address) {
    this.address = address;
    if (!this.#clients.has(address)) {
      const { AgentService, JobService } = perseus.v1;
      const agents = new AgentService(address, credentials());
      this.#clients.set(address, { agents, jobs: new JobService(address, credentials()) });
    }
    Object.assign(this, this.#clients.get(address));
  }

  /** Go where an error or a refusal says that the job is served, at most twice in a row; otherwise back to the target. */
  follow({ reason, metadata }) {
    const address = reason === 'SERVED_ELSEWHERE' && metadata.address;
    const isFollowed = address && address !== this.address && this.#hopCount < MAX_HOPS;
    this.#hopCount = isFollowed ? this.#hopCount + 1 : 0;
    this.#go(isFollowed ? address : this.#target);
    return isFollowed;
  }

  /** Call a method of JobService. All of them may be retried, so a lost answer does no harm. */
  async call(method, request, attempts = 20) {
    for (let attempt = 1; ; attempt += 1) {
      try {
        return await this.#callOnce(method, request);
      } catch (error) {
        if (this.follow(infoOf(error))) continue;
        if (attempt === attempts || !RETRIED.has(error.code)) throw error;
        await sleep(1000 * RETRY_S);
      }
    }
  }

  #callOnce(method, request) {
    return new Promise((resolve, reject) => {
      const deadline = Date.now() + 1000 * DEADLINE_S;
      this.jobs[method](request, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer)));
    });
  }

  close() {
    for (const { agents, jobs } of this.#clients.values()) {
      agents.close();
      jobs.close();
    }
  }
}

// The part of google.rpc for status details: field numbers and types are those of the standard.
const rpc = protobuf.parse(`
  syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
`).root;

/** The stable reason of an error, such as JOB_NOT_FOUND, and its values; empty if the coordinator gave none. */
export function infoOf(error) {
  const [bytes] = error.metadata?.get('grpc-status-details-bin') ?? [];
  const details = bytes ? rpc.lookupType('Status').decode(bytes).details : [];
  const info = details.find((detail) => detail.typeUrl.endsWith('/google.rpc.ErrorInfo'));
  return info ? rpc.lookupType('ErrorInfo').decode(info.value) : { reason: '', metadata: {} };
}
