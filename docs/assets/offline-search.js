// Browsers start no workers for pages that are read from a folder. There, the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inside = frame.contentWindow
      this.ready = new Promise(resolve => {
        inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
        inside.importScripts = (...urls) => urls.reduce((last, next) => last.then(() => load(inside, next)), Promise.resolve())
        load(inside, url).then(() => resolve(inside))
      })
      this.addEventListener("message", event => this.onmessage?.(event))
    }

    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
  }
  window.Worker = window.IFrameWorker

  function load(inside, url) {
    return new Promise((resolve, reject) => {
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = resolve
      script.onerror = reject
      inside.document.body.appendChild(script)
    })
  }
}
