/**
 * A stream of server-sent events that is opened again whenever it ends.
 *
 * The browser's own reconnecting gives up for good at the first answer that is not a stream (a proxy's 502, a
 * starting coordinator). This one keeps trying after growing, random waits, so that not all pages come back to a
 * restarted coordinator at once.
 */

const MIN_WAIT_MS = 500;
const MAX_WAIT_MS = 8_000;

export class EventStream {
  /**
   * @param {() => string} address returns the stream's address, for each connection
   * @param {string[]} names of the events wanted
   * @param {(name: string, data: object) => void} onEvent
   * @param {(state: {isLive: boolean, hasEnded: boolean, heardAt: number|null}) => void} onState
   * @param {() => Promise<boolean>} mayGoOn called before a stream is opened again: false if the session has ended
   */
  constructor(address, names, onEvent, onState, mayGoOn) {
    this._address = address;
    this._names = names;
    this._onEvent = onEvent;
    this._onState = onState;
    this._mayGoOn = mayGoOn;
    this._waitMs = MIN_WAIT_MS;
    this._heardAt = null;
    this._source = null;
    this._timer = 0;
    this._isClosed = false;
    // When a laptop wakes up or the network is back, reconnect at once.
    this._hurry = () => {
      if (!this._source && !this._isClosed && document.visibilityState === "visible") this._reopen();
    };
    window.addEventListener("online", this._hurry);
    document.addEventListener("visibilitychange", this._hurry);
    this._open();
  }

  close() {
    this._isClosed = true;
    clearTimeout(this._timer);
    this._source?.close();
    this._source = null;
    window.removeEventListener("online", this._hurry);
    document.removeEventListener("visibilitychange", this._hurry);
  }

  _open() {
    const source = new EventSource(this._address());
    this._source = source;
    source.onopen = () => {
      this._waitMs = MIN_WAIT_MS;
      this._heardAt = Date.now();
      this._onState({ isLive: true, hasEnded: false, heardAt: this._heardAt });
    };
    source.onerror = () => this._wait();
    source.addEventListener("end", (event) => this._end(JSON.parse(event.data).reason));
    for (const name of this._names) {
      source.addEventListener(name, (event) => {
        this._heardAt = Date.now();
        this._onEvent(name, JSON.parse(event.data));
      });
    }
  }

  /** The coordinator ends the stream: for good after the run's end, otherwise the stream is opened again. */
  _end(reason) {
    if (reason !== "RUN_ENDED") {
      this._wait();
      return;
    }
    this.close();
    this._onState({ isLive: false, hasEnded: true, heardAt: this._heardAt });
  }

  _wait() {
    this._source?.close();
    this._source = null;
    if (this._isClosed) return;
    const waitMs = this._waitMs * (0.5 + Math.random());
    this._waitMs = Math.min(2 * this._waitMs, MAX_WAIT_MS);
    this._onState({ isLive: false, hasEnded: false, heardAt: this._heardAt });
    clearTimeout(this._timer);
    this._timer = setTimeout(() => this._reopen(), waitMs);
  }

  async _reopen() {
    clearTimeout(this._timer);
    let mayGoOn;
    try {
      mayGoOn = await this._mayGoOn();
    } catch {
      this._wait();
      return;
    }
    if (this._isClosed || this._source) return;
    if (mayGoOn) this._open();
  }
}
