// The standard services that every coordinator has: health, and reflection.

import { createRequire } from 'node:module';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';
import health from 'grpc-health-check';
import { credentials } from './coordinator.js';

const DEADLINE_S = 5;

const require = createRequire(import.meta.url);
const reflectionProto = require.resolve('@grpc/reflection/build/proto/grpc/reflection/v1/reflection.proto');
const { grpc: standard } = grpc.loadPackageDefinition(protoLoader.loadSync(reflectionProto));
const Health = grpc.makeGenericClientConstructor(health.service, 'Health');

/** Whether a service serves: SERVING, NOT_SERVING or SERVICE_UNKNOWN. */
export function serving(target, service) {
  const client = new Health(target, credentials());
  return new Promise((resolve, reject) => {
    client.check({ service }, { deadline: deadline() }, (error, answer) => {
      client.close();
      if (error) reject(error);
      else resolve(answer.status);
    });
  });
}

/** The names of all services. */
export function services(target) {
  const client = new standard.reflection.v1.ServerReflection(target, credentials());
  return new Promise((resolve, reject) => {
    const stream = client.serverReflectionInfo({ deadline: deadline() });
    stream.on('error', reject);
    stream.on('data', ({ listServicesResponse }) => {
      resolve(listServicesResponse.service.map(({ name }) => name));
      stream.end();
      client.close();
    });
    stream.write({ listServices: '' });
  });
}

function deadline() {
  return Date.now() + 1000 * DEADLINE_S;
}
