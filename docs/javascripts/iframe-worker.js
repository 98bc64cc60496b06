// A browser starts no worker from a file:// URL. This runs the worker of the site's search in a hidden frame there.
(() => {
  if (location.protocol !== "file:") return;

  class FrameWorker extends EventTarget {
    #frame = document.createElement("iframe");
    #ready;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inner = this.#frame.contentWindow;
      // The scope that the worker's script expects. The script awaits `importScripts`.
      inner.importScripts = (...scripts) =>
        scripts.reduce((done, script) => done.then(() => this.#load(script)), Promise.resolve());
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.#ready = this.#load(url);
    }

    postMessage(data) {
      const inner = this.#frame.contentWindow;
      this.#ready.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }

    #load(url) {
      return new Promise((loaded, failed) => {
        const script = this.#frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = loaded;
        script.onerror = () => failed(new Error(`${url} cannot be loaded`));
        this.#frame.contentDocument.head.append(script);
      });
    }
  }

  window.Worker = FrameWorker;
})();
